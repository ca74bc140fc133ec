"""The DTensor side of a declaration: how an annotated op runs on sharded tensors.

Everything follows from the annotation and the placements of the inputs: which identifier each mesh
axis splits, and the placements of the other inputs, the results and the gradients. If the split
communicates inside the op, the mesh axis's group is passed on in the op's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..binding import BoundAnnotation, Split, Spread, check_parts
from ..errors import AnnotationError, PartitionError, Span
from ..registry import OpRecord
from ..rules import PartitionRule, SplitSite


def placement(cut: int | Spread) -> Placement:
    """A tensor's placement along one mesh axis; ``cut`` is as in :class:`~.binding.Split`."""
    if isinstance(cut, int):
        return Shard(cut)
    return Partial() if cut is Spread.PARTIAL else Replicate()


def gradient_placement(cut: int | Spread, reduce: bool) -> Placement:
    """The placement of a tensor's gradient along one mesh axis.

    A replicated input of a split op gets a partial sum of its gradient from each rank; the gradient
    of a partial sum is the same on every rank.
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
    arguments |= _shard_arguments(record, bound, mesh, splits, arguments)
    shapes = {name: tuple(v.shape) for name, v in arguments.items() if isinstance(v, Tensor)}

    n_annotated = len(bound.annotation.inputs)
    placements = [_placements(splits, i, "inputs") for i in range(n_annotated)]
    placements += [[Replicate()] * mesh.ndim] * (len(names) - n_annotated)
    results = [_placements(splits, i, "outputs") for i in range(n)]
    local = [_local(v, mesh, p) for v, p in zip(arguments.values(), placements, strict=True)]
    if not backward:
        return _wrap(func(*local), mesh, results, bound.output_shapes())
    # A result that is a partial sum has the same gradient on every rank.
    flowing = [[Replicate() if p.is_partial() else p for p in of_one] for of_one in results]
    outputs = func(
        *(
            _divided(_local(v, mesh, p), record.rule, splits, mesh, i)
            for i, (v, p) in enumerate(zip(grads, flowing, strict=True))
        ),
        *local,
        *(_local(v, mesh, p) for v, p in zip(saved, results, strict=record.saves_results)),
    )
    at = [names.index(name) for name in record.differentiable]
    of_gradients = [[_gradient_placement(split, i) for split in splits] for i in at]
    return _wrap(outputs, mesh, of_gradients, [shapes.get(n) for n in record.differentiable])


def _shard_arguments(
    record: OpRecord,
    bound: BoundAnnotation,
    mesh: DeviceMesh,
    splits: list[Split | None],
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """The op's arguments that say which part of the whole this rank has."""
    found: dict[str, Any] = {}
    for axis, split in enumerate(splits):
        if split is None:
            continue
        size, group = bound.sizes[split.identifier], mesh.get_group(axis).group_name
        rank = mesh.get_local_rank(axis)
        site = SplitSite(split.identifier, size, mesh.size(axis), group, index=rank)
        found |= record.rule.arguments(record.title, site, arguments)
        if unknown := ", ".join(repr(name) for name in found if name not in arguments):
            raise AnnotationError(
                f"the rule for splits of {site.identifier!r} gives {unknown}, which the op has not",
                details=[f"expected: arguments of the op: {', '.join(arguments)}"],
                op=record.title,
            )
    return found


def _allowed(
    record: OpRecord, arguments: dict[str, Any], mesh: DeviceMesh
) -> tuple[BoundAnnotation, list[Split | None]]:
    """The first alternative that allows the inputs' placements, and the split of each mesh axis.

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
    """What each mesh axis splits, from the inputs' placements; None if it splits nothing.

    Raises:
        PartitionError: an input is cut where the annotation does not allow it, two inputs disagree,
            or one identifier is cut along two axes.
    """

    def refused(problem: str, span: Span, axes: Sequence[int], expected: str) -> PartitionError:
        details = [_placed(arguments, mesh, axis) for axis in axes]
        details += [f"expected: {expected}"] if expected else []
        return bound.error(problem, span, *details)

    splits: list[Split | None] = []
    for axis in range(mesh.ndim):
        found: dict[str, Span] = {}  # where each identifier that is cut is written
        for value, shape in zip(arguments.values(), bound.annotation.inputs, strict=False):
            if isinstance(value, DTensor) and isinstance(cut := value.placements[axis], Shard):
                dim = None if shape.ignored else shape.dims[cut.dim]
                found.setdefault("?" if dim is None else dim.leading, (dim or shape).span)
        if len(found) > 1:
            names = " and ".join(map(repr, found))
            problem = f"inputs are cut on different identifiers, {names}, along one mesh axis"
            expected = _fitting(bound, arguments, found)
            raise refused(problem, list(found.values())[1], [axis], expected)
        split = bound.split(next(iter(found))) if found else None
        if split is not None and split in splits:
            name = split.identifier
            others = [repr(s.identifier) for s in bound.splits() if s.identifier != name]
            other = ", ".join([*others, "or nothing" if others else "nothing"])
            problem = f"{name!r} is cut along two mesh axes"
            expected = f"{name!r} along one of them, and along the other {other}"
            raise refused(problem, found[name], [splits.index(split), axis], expected)
        splits.append(split)
    return splits


def _fitting(bound: BoundAnnotation, arguments: dict[str, Any], found: dict[str, Span]) -> str:
    """The cuts of inputs that are possible, of the identifiers ``found`` if any; empty if none."""

    def in_words(split: Split) -> str:
        cuts = zip(arguments, split.inputs, strict=False)
        dims = ", ".join(f"{n} on dim {cut}" for n, cut in cuts if isinstance(cut, int))
        return f"{split.identifier!r} ({dims})"

    possible = [split for split in bound.splits() if split.identifier in found] or bound.splits()
    fits = " or ".join(map(in_words, possible))
    return f"{fits}; inputs that are whole fit any of them" if fits else ""


def _placed(arguments: dict[str, Any], mesh: DeviceMesh, axis: int) -> str:
    """Every input's placement along a mesh axis, in words."""

    def in_words(value: Tensor) -> str:
        where = value.placements[axis] if isinstance(value, DTensor) else Replicate()
        if isinstance(where, Shard):
            return f"cut on dim {where.dim}"
        return "a partial sum" if where.is_partial() else "whole"

    name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
    tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
    placed = ", ".join(f"{n} is {in_words(v)}" for n, v in tensors.items())
    return f"along mesh axis {name!r} over {mesh.size(axis)} ranks: {placed}"


def _placements(splits: list[Split | None], index: int, side: str) -> list[Placement]:
    return [Replicate() if s is None else placement(getattr(s, side)[index]) for s in splits]


def _gradient_placement(split: Split | None, index: int) -> Placement:
    if split is None:
        return Replicate()
    if index >= len(split.inputs):  # not annotated: whole on every rank
        return gradient_placement(Spread.REPLICATE, True)
    return gradient_placement(split.inputs[index], split.grad_reduce[index])


def _divided(
    grad: Any, rule: PartitionRule, splits: list[Split | None], mesh: DeviceMesh, index: int
) -> Any:
    """A result's gradient, divided by the number of ranks if the rule says so."""
    for axis, split in enumerate(splits):
        if grad is not None and split is not None and rule.divides_gradients(split)[index]:
            grad = grad / mesh.size(axis)
    return grad


def _local(value: Any, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    if not isinstance(value, DTensor):
        return value
    if tuple(value.placements) != tuple(placements):
        # Inside an op autograd records nothing, and torch 2.11 cannot redistribute a tensor that
        # requires a gradient.
        value = value.detach().redistribute(mesh, placements)  # type: ignore[attr-defined]
    return value.to_local()


def _wrap(outputs: Any, mesh: DeviceMesh, placements: Any, shapes: Any) -> Any:
    single = isinstance(outputs, Tensor)
    wrapped = []
    for local, places, shape in zip(
        (outputs,) if single else outputs, placements, shapes, strict=True
    ):
        # A result that the annotation leaves open is not cut; '1' may be a result of no dims.
        whole = local.shape if shape is None or local.ndim == 0 else torch.Size(shape)
        stride = torch.empty(whole, device="meta").stride()
        wrapped.append(
            DTensor.from_local(local, mesh, places, run_check=False, shape=whole, stride=stride)
        )
    return wrapped[0] if single else tuple(wrapped)
