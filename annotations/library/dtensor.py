"""The DTensor side of a declaration: how an annotated op runs on sharded tensors.

From the annotation and where the inputs are cut follows everything: which identifier each mesh axis
splits, how the other inputs must lie, how results and gradients lie. Where the split communicates
inside the op, the mesh axis's group is passed on in the op's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..binding import BoundAnnotation, Split, Spread
from ..errors import AnnotationError, PartitionError, Span
from ..grammar import Dim
from ..registry import OpRecord
from ..rules import PartitionRule, SplitSite, check_parts

Cut = int | Spread


def placement(cut: Cut) -> Placement:
    """How a tensor lies along one mesh axis."""
    if isinstance(cut, int):
        return Shard(cut)
    return Partial() if cut is Spread.PARTIAL else Replicate()


def gradient_placement(cut: Cut, reduce: bool) -> Placement:
    """How the gradient of a tensor that lies as ``cut`` lies.

    A replicated input of a split op gets a part of its gradient from each rank; the gradient of a
    partial sum is the same for each of its parts.
    """
    if isinstance(cut, int):
        return Shard(cut)
    return Partial() if cut is Spread.REPLICATE and reduce else Replicate()


def install(record: OpRecord) -> None:
    """Teach DTensor to run ``record``'s forward and backward op."""

    def forward(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run(record, func, args, backward=False)

    def backward(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run(record, func, args, backward=True)

    torch.library.register_torch_dispatch(record.name, DTensor, forward)
    torch.library.register_torch_dispatch(f"{record.name}_backward", DTensor, backward)


def _run(record: OpRecord, func: Any, args: Sequence[Any], *, backward: bool) -> Any:
    names = tuple(record.signature.parameters)
    n = record.n_outputs
    grads, saved = (args[:n], args[n + len(names) :]) if backward else ((), ())
    inputs = args[n : n + len(names)] if backward else args
    arguments = record.arguments(inputs, {})
    mesh = next(v.device_mesh for v in (*inputs, *grads) if isinstance(v, DTensor))
    bound, splits = _allowed(record, arguments, mesh)
    whole = dict(arguments)
    for site in _sites(bound, mesh, splits):
        told = record.rule.arguments(record.title, site, whole)
        if unknown := ", ".join(map(repr, told.keys() - set(names))):
            raise AnnotationError(
                f"the rule for splits of {site.identifier!r} gives {unknown}, which the op has not",
                details=[f"expected: arguments of the op: {', '.join(names)}"],
                op=record.title,
            )
        arguments.update(told)

    n_annotated = len(bound.annotation.inputs)
    spread = [_placements(splits, i, "inputs") for i in range(n_annotated)]
    spread += [[Replicate()] * mesh.ndim] * (len(names) - n_annotated)
    results = [_placements(splits, i, "outputs") for i in range(n)]
    local = [_local(v, mesh, p) for v, p in zip(arguments.values(), spread, strict=True)]
    if not backward:
        outputs = func(*local)
        shapes = bound.output_shapes()
        return _wrap(outputs, mesh, results, shapes)
    # A result that is a partial sum has the same gradient on every rank.
    flowing = [[Replicate() if p.is_partial() else p for p in places] for places in results]
    outputs = func(
        *(
            _share(_local(v, mesh, p), record.rule, splits, mesh, i)
            for i, (v, p) in enumerate(zip(grads, flowing, strict=True))
        ),
        *local,
        *(_local(v, mesh, p) for v, p in zip(saved, results, strict=record.saves_results)),
    )
    places, wholes = [], []
    for name in record.differentiable:
        i = names.index(name)
        places.append([_gradient_placement(s, i) for s in splits])
        value = arguments[name]
        wholes.append(tuple(value.shape) if isinstance(value, Tensor) else None)
    return _wrap(outputs, mesh, places, wholes)


def _allowed(
    record: OpRecord, arguments: dict[str, Any], mesh: DeviceMesh
) -> tuple[BoundAnnotation, list[Split | None]]:
    """The first alternative that allows how the inputs lie, and the split of each mesh axis.

    Raises:
        PartitionError: none does; says why the first does not.
    """
    refused: list[PartitionError] = []
    for bound in record.bindings(arguments):
        try:
            splits = splits_of(bound, arguments, mesh)
            for axis, split in enumerate(splits):
                if split is not None:
                    check_parts(bound, split, mesh.size(axis))
        except PartitionError as error:
            refused.append(error)
        else:
            return bound, splits
    raise refused[0]


def splits_of(
    bound: BoundAnnotation, arguments: dict[str, Any], mesh: DeviceMesh
) -> list[Split | None]:
    """What each mesh axis splits, read off the inputs' placements; None where nothing is cut.

    Raises:
        PartitionError: an input is cut where the annotation does not allow it, two inputs disagree,
            or one identifier is cut along two axes.
    """
    splits: list[Split | None] = []
    for axis in range(mesh.ndim):
        found: dict[str, Span] = {}
        for value, shape in zip(arguments.values(), bound.annotation.inputs, strict=False):
            if isinstance(value, DTensor) and isinstance(cut := value.placements[axis], Shard):
                dim = None if shape.ignored else shape.dims[cut.dim]
                found.setdefault(_leading(dim), (dim or shape).span)
        if len(found) > 1:
            raise _disagreeing(bound, arguments, mesh, axis, found)
        splits.append(bound.split(next(iter(found))) if found else None)
        before = next((n for n, s in enumerate(splits[:-1]) if s and s == splits[-1]), None)
        if before is not None:
            [(identifier, span)] = found.items()
            raise _twice(bound, arguments, mesh, (before, axis), identifier, span)
    return splits


def _leading(dim: Dim | None) -> str:
    """The identifier that a cut of ``dim`` cuts; None is of a tensor that is not annotated."""
    if dim is None:
        return "?"
    return next((name for name in dim.identifiers if name != "1"), "1")


def _disagreeing(
    bound: BoundAnnotation,
    arguments: dict[str, Any],
    mesh: DeviceMesh,
    axis: int,
    found: dict[str, Span],
) -> PartitionError:
    names = " and ".join(map(repr, found))
    possible = [split for split in bound.splits() if split.identifier in found] or bound.splits()
    fits = [_cut_on(split, arguments) for split in possible]
    details = [_lying(arguments, mesh, axis)]
    if fits:
        details.append(f"expected: {' or '.join(fits)}; inputs that are whole fit any of them")
    problem = f"inputs are cut on different identifiers, {names}, along one mesh axis"
    return PartitionError(
        problem, bound.annotation.text, list(found.values())[1], details, bound.op
    )


def _twice(
    bound: BoundAnnotation,
    arguments: dict[str, Any],
    mesh: DeviceMesh,
    axes: tuple[int, int],
    identifier: str,
    span: Span,
) -> PartitionError:
    others = [repr(s.identifier) for s in bound.splits() if s.identifier != identifier]
    details = [_lying(arguments, mesh, axis) for axis in axes]
    details.append(
        f"expected: {identifier!r} along one of them, and along the other "
        + ", ".join([*others, "or nothing" if others else "nothing"])
    )
    problem = f"{identifier!r} is cut along two mesh axes"
    return PartitionError(problem, bound.annotation.text, span, details, bound.op)


def _lying(arguments: dict[str, Any], mesh: DeviceMesh, axis: int) -> str:
    """How every input lies along a mesh axis, in words."""

    def place(value: Tensor) -> str:
        where = value.placements[axis] if isinstance(value, DTensor) else Replicate()
        if isinstance(where, Shard):
            return f"cut on dim {where.dim}"
        return "a partial sum" if where.is_partial() else "whole"

    name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
    tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
    lying = ", ".join(f"{n} is {place(v)}" for n, v in tensors.items())
    return f"along mesh axis {name!r} over {mesh.size(axis)} ranks: {lying}"


def _cut_on(split: Split, arguments: dict[str, Any]) -> str:
    """Which dims of which inputs a split cuts, in words."""
    cuts = zip(arguments, split.inputs, strict=False)
    dims = ", ".join(f"{n} on dim {cut}" for n, cut in cuts if isinstance(cut, int))
    return f"{split.identifier!r} ({dims})"


def _sites(bound: BoundAnnotation, mesh: DeviceMesh, splits: list[Split | None]) -> list[SplitSite]:
    return [
        SplitSite(
            split.identifier,
            bound.sizes[split.identifier],
            mesh.size(axis),
            mesh.get_group(axis).group_name,
            index=mesh.get_local_rank(axis),
        )
        for axis, split in enumerate(splits)
        if split is not None
    ]


def _placements(splits: list[Split | None], index: int, side: str) -> list[Placement]:
    return [Replicate() if s is None else placement(getattr(s, side)[index]) for s in splits]


def _gradient_placement(split: Split | None, index: int) -> Placement:
    if split is None:
        return Replicate()
    if index >= len(split.inputs):  # not annotated: whole on every rank
        return gradient_placement(Spread.REPLICATE, True)
    return gradient_placement(split.inputs[index], split.grad_reduce[index])


def _share(
    grad: Any, rule: PartitionRule, splits: list[Split | None], mesh: DeviceMesh, index: int
) -> Any:
    """The gradient of a result that the rule has divided among the ranks that compute it whole."""
    for axis, split in enumerate(splits):
        if grad is not None and split is not None and rule.divides_gradients(split)[index]:
            grad = grad / mesh.size(axis)
    return grad


def _local(value: Any, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    if not isinstance(value, DTensor):
        return value
    if tuple(value.placements) != tuple(placements):
        # Detached: inside an op nothing is recorded, and torch 2.11 fails to move what asks for it.
        value = value.detach().redistribute(mesh, placements)  # type: ignore[attr-defined]
    return value.to_local()


def _wrap(outputs: Any, mesh: DeviceMesh, placements: Any, shapes: Any) -> Any:
    single = isinstance(outputs, Tensor)
    wrapped = []
    for local, places, shape in zip(
        (outputs,) if single else outputs, placements, shapes, strict=True
    ):
        # What the annotation leaves open is not cut; '1' may stand for no dim.
        whole = local.shape if shape is None or local.ndim == 0 else torch.Size(shape)
        stride = torch.empty(whole, device="meta").stride()
        wrapped.append(
            DTensor.from_local(local, mesh, places, run_check=False, shape=whole, stride=stride)
        )
    return wrapped[0] if single else tuple(wrapped)
