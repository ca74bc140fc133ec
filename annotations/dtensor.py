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

from .binding import BoundAnnotation, Split, Spread
from .errors import PartitionError
from .registry import OpRecord
from .rules import SplitSite, check_parts

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
    for site in _sites(bound, mesh, splits):
        arguments.update(record.rule.arguments(record.title, site))

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
    # An op that communicates inside sees to its ranks' shares itself.
    outside = [s if s and s.identifier not in record.rule.communicates else None for s in splits]
    outputs = func(
        *(
            _share(_local(v, mesh, p), outside, mesh, i)
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
            splits = splits_of(record, bound, arguments, mesh)
            for axis, split in enumerate(splits):
                if split is not None:
                    check_parts(bound, split, mesh.size(axis))
        except PartitionError as error:
            refused.append(error)
        else:
            return bound, splits
    raise refused[0]


def splits_of(
    record: OpRecord, bound: BoundAnnotation, arguments: dict[str, Any], mesh: DeviceMesh
) -> list[Split | None]:
    """What each mesh axis splits, read off the inputs' placements; None where nothing is cut.

    Raises:
        PartitionError: an input is cut where the annotation does not allow it, two inputs disagree,
            or one identifier is cut along two axes.
    """
    splits: list[Split | None] = []
    names = list(arguments)
    for axis in range(mesh.ndim):
        found: dict[str, str] = {}
        for i, shape in enumerate(bound.annotation.inputs):
            value = arguments[names[i]]
            if not isinstance(value, DTensor) or not isinstance(value.placements[axis], Shard):
                continue
            dim = value.placements[axis].dim  # type: ignore[attr-defined]
            inner = [] if shape.ignored else list(shape.dims[dim].identifiers)
            leading = next((x for x in inner if x != "1"), "1" if inner else "?")
            found[leading] = f"{names[i]} is cut on dim {dim}"
        if len(found) > 1:
            what = ", ".join(f"{why} ({leading!r})" for leading, why in sorted(found.items()))
            raise PartitionError(f"{record.title}: inputs are cut on different identifiers: {what}")
        splits.append(bound.split(next(iter(found))) if found else None)
    cut = [s.identifier for s in splits if s is not None]
    if len(set(cut)) < len(cut):
        raise PartitionError(f"{record.title}: one identifier is cut along two mesh axes: {cut}")
    return splits


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


def _share(grad: Any, splits: list[Split | None], mesh: DeviceMesh, index: int) -> Any:
    """A rank's share of the gradient of a result that every rank computes whole.

    The gradients that the ranks get from it are added up, with those from results that are cut.
    """
    for axis, split in enumerate(splits):
        if grad is None or split is None or split.outputs[index] is not Spread.REPLICATE:
            continue
        inputs = zip(split.inputs, split.grad_reduce, strict=True)
        if any(cut is Spread.REPLICATE and reduce for cut, reduce in inputs):
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
