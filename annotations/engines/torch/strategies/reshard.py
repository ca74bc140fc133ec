"""Moves a tensor from its placements to others: along a path of steps, each on one mesh axis.

Where two axes cut one dim, the later cuts the parts of the earlier, so a step may touch a dim only
while no later axis cuts it. Paths are the cheapest in bytes under that rule, found once and run as
found, so what a plan predicts is what moves.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from annotations.library.dtensor import of_parts
from annotations.solving import TensorShape

from ..capture.nodes import example_shape
from .placements import Placements, gradient_of, local_shape, share


@dataclass(frozen=True)
class ReshardStep:
    """One collective along one axis.

    Attributes:
        axis: of the mesh. before, after: the tensor's placements; they differ along ``axis`` alone.
        kind: "all-gather", "all-to-all", "all-reduce", "reduce-scatter" or "slice", which is free.
        elements: received by the rank that receives most. For an all-reduce this is by the ring
            algorithm, and can be a fraction for a few elements.
    """

    axis: int
    before: Placements
    after: Placements
    kind: str
    elements: float


@functools.lru_cache(maxsize=1 << 16)
def steps(
    shape: TensorShape, source: Placements, target: Placements, parts: tuple[int, ...]
) -> tuple[ReshardStep, ...]:
    """The path that receives least, and the shortest of such paths.

    Args:
        shape: of the whole tensor. parts: the mesh's shape.
    """
    along = [dict.fromkeys((s, t, Replicate())) for s, t in zip(source, target, strict=True)]
    numbers = itertools.count()  # so that the heap never compares placements
    queue: list[Any] = [(0, 0, next(numbers), source, ())]
    done: set[Placements] = set()
    while queue:
        elements, length, _, here, path = heapq.heappop(queue)
        if here == target:
            return path
        if here in done:
            continue
        done.add(here)
        for axis, others in enumerate(along):
            for placement in others:
                step = _step(shape, here, axis, placement, parts)
                if step is not None and step.after not in done:
                    total = elements + step.elements
                    entry = (total, length + 1, next(numbers), step.after, (*path, step))
                    heapq.heappush(queue, entry)
    raise AssertionError("gathering everything and slicing it is always a path")


def _step(
    shape: TensorShape, here: Placements, axis: int, to: Any, parts: tuple[int, ...]
) -> ReshardStep | None:
    """The step along ``axis``, None where there is none or a later axis cuts the same dim."""
    placement, n = here[axis], parts[axis]
    if placement == to or isinstance(to, Partial):
        return None
    dims = {p.dim for p in (placement, to) if isinstance(p, Shard)}
    if any(isinstance(p, Shard) and p.dim in dims for p in here[axis + 1 :]):
        return None
    after = (*here[:axis], to, *here[axis + 1 :])
    joint = local_shape(shape, (*here[:axis], Replicate(), *here[axis + 1 :]), parts)
    size = math.prod(joint)

    def padded(dim: int) -> int:
        """Elements of the largest part, to which all parts are padded."""
        return share(joint[dim], n, 0) * (size // joint[dim]) if size else 0

    match placement, to:
        case Shard(), Shard():
            kept = [
                share(joint[placement.dim], n, r) * share(joint[to.dim], n, r) for r in range(n)
            ]
            due = [joint[placement.dim] * share(joint[to.dim], n, r) for r in range(n)]
            rest = size // (joint[placement.dim] * joint[to.dim]) if size else 0
            most = max(a - b for a, b in zip(due, kept, strict=True))
            return ReshardStep(axis, here, after, "all-to-all", most * rest)
        case Shard(), _:
            return ReshardStep(axis, here, after, "all-gather", padded(placement.dim) * (n - 1))
        case Partial(), Shard():
            return ReshardStep(axis, here, after, "reduce-scatter", padded(to.dim) * (n - 1))
        case Partial(), _:
            return ReshardStep(axis, here, after, "all-reduce", 2 * size * (n - 1) / n)
    return ReshardStep(axis, here, after, "slice", 0)


class Move(torch.autograd.Function):
    """Moves a DTensor to other placements, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, value: Any, target: Placements) -> Any:  # type: ignore[override]
        """``value`` brought to ``target``."""
        ctx.source = tuple(value.placements)
        return brought(value.detach(), target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:  # type: ignore[override]
        """The gradient moved back; that of a partial sum is whole."""
        return brought(grad, gradient_of(ctx.source)), None


def brought(value: Any, target: Placements) -> Any:
    """A DTensor brought to ``target`` along the cheapest path; not differentiated."""
    source = tuple(value.placements)
    shape = example_shape(value.shape)
    for step in steps(shape, source, target, tuple(value.device_mesh.shape)):
        if step.kind == "all-to-all":
            value = _exchange(value, step)
        else:
            value = value.redistribute(placements=step.after)
    return _contiguous(value)


def _contiguous(value: Any) -> Any:
    """``value`` with contiguous strides, both of the whole and of this rank's part. The strides of
    the whole decide if a view needs a copy; a move keeps them, but lays out the parts anew."""
    local: Tensor = value.to_local()
    if local.is_contiguous() and value.is_contiguous():
        return value
    return of_parts(local.contiguous(), value.device_mesh, value.placements, value.shape)


def _exchange(value: Any, step: ReshardStep) -> Any:
    """Change which dim is cut, by one all-to-all of exactly what must move."""
    mesh, axis = value.device_mesh, step.axis
    was, to = step.before[axis], step.after[axis]
    assert isinstance(was, Shard) and isinstance(to, Shard)
    at, n = mesh.get_coordinate(), mesh.size(axis)
    joint = list(step.before)
    joint[axis] = Replicate()
    whole = local_shape(value.shape, tuple(joint), mesh.shape, at)
    held = [share(whole[was.dim], n, r) for r in range(n)]
    wanted = [share(whole[to.dim], n, r) for r in range(n)]
    local: Tensor = value.to_local()
    pieces = [piece.reshape(-1) for piece in local.split(wanted, to.dim)]
    shapes = [list(local.shape) for _ in range(n)]
    for shape, size in zip(shapes, held, strict=True):
        shape[was.dim], shape[to.dim] = size, wanted[at[axis]]
    sizes = [math.prod(shape) for shape in shapes]
    received = functional.all_to_all_single(
        torch.cat(pieces), sizes, [len(piece) for piece in pieces], mesh.get_group(axis)
    )
    received = functional.wait_tensor(received)
    parts = [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
    return DTensor.from_local(
        torch.cat(parts, was.dim),
        mesh,
        step.after,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
