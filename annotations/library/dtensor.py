"""The DTensor side of a declaration: how an annotated op runs on sharded tensors.

Everything follows from the annotation and the placements of the inputs: which identifier each mesh
axis splits, and the placements of the other inputs, the results and the gradients. If the split
communicates inside the op, the mesh axis's group is passed on in the op's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..binding import BoundAnnotation, Split, Spread, check_parts
from ..errors import AnnotationError, PartitionError, Span
from ..registry import OpRecord, as_tuple
from ..rules import Arguments, SplitSite


def placement(cut: int | Spread) -> Placement:
    """A tensor's placement along one mesh axis, from what a split does to it."""
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


def of_parts(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """A contiguous DTensor of this shape, of which each rank has its ``local`` part."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def install(record: OpRecord) -> None:
    """Teach DTensor to run ``record``'s forward and backward op."""

    def forward(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run_forward(record, func, args)

    def backward(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run_backward(record, func, args)

    torch.library.register_torch_dispatch(record.name, DTensor, forward)
    torch.library.register_torch_dispatch(f"{record.name}_backward", DTensor, backward)


def _run_forward(record: OpRecord, op: Any, args: Sequence[Any]) -> Any:
    call = _sharded(record, args, args)
    return call.wrap(op(*call.local_inputs()), call.results, call.bound.output_shapes())


def _run_backward(record: OpRecord, op: Any, args: Sequence[Any]) -> Any:
    n, last = record.n_outputs, record.n_outputs + len(record.signature.parameters)
    grads, inputs, saved = args[:n], args[n:last], args[last:]
    call = _sharded(record, inputs, (*inputs, *grads))
    outputs = op(
        *(call.local_gradient(i, grad) for i, grad in enumerate(grads)),
        *call.local_inputs(),
        *map(call.local, saved, call.results),
    )
    names = list(call.arguments)
    placements = [call.gradient_of_input(names.index(name)) for name in record.differentiable]
    shapes = [getattr(call.arguments[name], "shape", None) for name in record.differentiable]
    return call.wrap(outputs, placements, shapes)


@dataclass(frozen=True)
class _ShardedCall:
    """A call with DTensors; what each mesh axis splits gives the placements of its tensors.

    Attributes:
        arguments: by name; those of the shard, and whole tensors.
        splits: the split along each mesh axis; None if it splits nothing.
    """

    record: OpRecord
    arguments: Arguments
    mesh: DeviceMesh
    bound: BoundAnnotation
    splits: Sequence[Split | None]

    @cached_property
    def results(self) -> list[list[Placement]]:
        """The placements of each result."""
        return [
            [Replicate() if s is None else placement(s.outputs[n]) for s in self.splits]
            for n in range(self.record.n_outputs)
        ]

    def gradient_of_input(self, index: int) -> list[Placement]:
        """The placements of the gradient that the backward returns for an input."""

        def along(split: Split | None) -> Placement:
            if split is None:
                return Replicate()
            if index >= len(split.inputs):  # not annotated: whole on every rank
                return gradient_placement(Spread.REPLICATE, True)
            return gradient_placement(split.inputs[index], split.grad_reduce[index])

        return [along(split) for split in self.splits]

    def local_inputs(self) -> Iterator[Any]:
        """The op's arguments on this rank; those that are not annotated are whole."""
        annotated = len(self.bound.annotation.inputs)
        for n, value in enumerate(self.arguments.values()):
            cuts = [s.inputs[n] if s and n < annotated else Spread.REPLICATE for s in self.splits]
            yield self.local(value, [placement(cut) for cut in cuts])

    def local_gradient(self, index: int, grad: Any) -> Any:
        """A result's gradient on this rank, divided by the number of ranks if the rule says so."""
        # A result that is a partial sum has the same gradient on every rank.
        flowing = [Replicate() if p.is_partial() else p for p in self.results[index]]
        grad = self.local(grad, flowing)
        for axis, split in enumerate(self.splits):
            divides = split is not None and self.record.rule.divides_gradients(split)[index]
            if grad is not None and divides:
                grad = grad / self.mesh.size(axis)
        return grad

    def local(self, value: Any, placements: Sequence[Placement]) -> Any:
        """This rank's part of a DTensor in these placements; any other value as it is."""
        if not isinstance(value, DTensor):
            return value
        if tuple(value.placements) != tuple(placements):
            # Inside an op autograd records nothing, and torch 2.11 cannot redistribute a tensor
            # that requires a gradient.
            value = value.detach().redistribute(self.mesh, placements)  # type: ignore[attr-defined]
        return value.to_local()

    def wrap(self, outputs: Any, placements: Any, shapes: Any) -> Any:
        """DTensors of these placements and shapes from what the op returned on this rank."""
        wrapped = []
        for local, of_one, shape in zip(as_tuple(outputs), placements, shapes, strict=True):
            # A result that the annotation leaves open is not cut; '1' may be a result of no dims.
            whole = local.shape if shape is None or local.ndim == 0 else torch.Size(shape)
            wrapped.append(of_parts(local, self.mesh, of_one, whole))
        return wrapped[0] if isinstance(outputs, Tensor) else tuple(wrapped)


def _sharded(record: OpRecord, inputs: Sequence[Any], tensors: Sequence[Any]) -> _ShardedCall:
    """A call with ``inputs``; its mesh is that of the first DTensor among ``tensors``."""
    arguments = record.arguments(inputs, {})
    mesh = next(value.device_mesh for value in tensors if isinstance(value, DTensor))
    bound, splits = _allowed(record, arguments, mesh)
    of_shard: dict[str, Any] = {}
    for axis, split in enumerate(splits):
        if split is None:
            continue
        size, group = bound.sizes[split.identifier], mesh.get_group(axis).group_name
        rank = mesh.get_local_rank(axis)
        site = SplitSite(split.identifier, size, mesh.size(axis), group, index=rank)
        of_shard |= record.rule.arguments(record.title, site, arguments)
        if unknown := ", ".join(repr(name) for name in of_shard if name not in arguments):
            raise AnnotationError(
                f"the rule for splits of {site.identifier!r} gives {unknown}, which the op has not",
                details=[f"expected: arguments of the op: {', '.join(arguments)}"],
                op=record.title,
            )
    return _ShardedCall(record, arguments | of_shard, mesh, bound, splits)


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
            expected = _possible_cuts(bound, arguments, found)
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


def _possible_cuts(
    bound: BoundAnnotation, arguments: dict[str, Any], found: dict[str, Span]
) -> str:
    """The possible cuts of inputs, as text: those on the identifiers ``found`` if there are any,
    else all; empty if there are none."""

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
