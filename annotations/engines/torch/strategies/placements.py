"""Placements of tensors on a mesh, and how much of a tensor is on which rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# Placements of a tensor, one for each axis of the mesh.
Placements = tuple[Placement, ...]


def share(size: int, parts: int, index: int) -> int:
    """How much of a dim rank ``index`` holds if the dim is cut as DTensor cuts."""
    each = -(-size // parts)
    return max(0, min(size, each * (index + 1)) - each * index)


def local_shape(
    shape: Iterable[int],
    placements: Placements,
    parts: Sequence[int],
    at: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Shape of the part of a tensor on the rank at coordinates ``at``, by default the first, which
    holds most. Axes cut in turn: where two cut one dim, the later cuts the parts of the earlier."""
    local = list(shape)
    for axis, (placement, n) in enumerate(zip(placements, parts, strict=True)):
        if isinstance(placement, Shard):
            local[placement.dim] = share(local[placement.dim], n, at[axis] if at else 0)
    return tuple(local)


def local_bytes(value: Any, placements: Placements, parts: Sequence[int]) -> int:
    """Bytes of a tensor on the rank that holds most of it."""
    if not isinstance(value, Tensor):
        return 0
    return math.prod(local_shape(value.shape, placements, parts)) * value.element_size()


def cut_axes(x: Tensor) -> tuple[int, ...]:
    """The mesh axes along which ranks hold different parts of ``x``: none for a plain tensor, or
    for a DTensor that is whole on every rank."""
    if not isinstance(x, DTensor):
        return ()
    return tuple(n for n, placement in enumerate(x.placements) if not placement.is_replicate())


def gradient_of(placements: Placements) -> Placements:
    """The placements of the gradient of a tensor with these: whole for a partial sum."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)


def fits(value: Any, placements: Placements, parts: Sequence[int]) -> bool:
    """Whether every rank gets some of a tensor with these placements."""
    if not isinstance(value, Tensor):
        return True
    over: dict[int, int] = {}
    for placement, n in zip(placements, parts, strict=True):
        if isinstance(placement, Shard):
            over[placement.dim] = over.get(placement.dim, 1) * n
    return all(value.shape[dim] >= n for dim, n in over.items())
