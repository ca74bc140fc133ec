"""Batches that differ from the user's batch in one respect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..op.arguments import ArgumentError
from .shards import Shards


def rows_and_tokens(op: str, name: str, entry: Any) -> tuple[int, int]:
    """The numbers of rows and tokens of the entry of tokens; 1 row if its shape is [l].

    Raises:
        ArgumentError: another shape, no tokens, or fewer than two different ones.
    """
    if not isinstance(entry, Tensor) or entry.ndim - entry.is_floating_point() not in (1, 2):
        shown = tuple(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__
        raise ArgumentError(
            f"{op}: batch[{name!r}] must be integers [b, l] or [l], or floating [b, l, d], "
            f"got {shown}"
        )
    shape = entry.shape[:-1] if entry.is_floating_point() else entry.shape
    if not entry.numel() or (not entry.is_floating_point() and len(entry.unique()) < 2):
        raise ArgumentError(
            f"{op}: batch[{name!r}] must have two different tokens at least, to change one into "
            f"another, got {tuple(entry.shape)} of one value"
        )
    return (1 if len(shape) == 1 else shape[0]), shape[-1]


def with_another(
    batch: Mapping[str, Any], name: str, row: int, place: int
) -> dict[str, Any] | None:
    """The batch with one token or label replaced by another value of the entry, or increased by 1
    if it is floating. None if the value is below 0, or if there is no other value."""
    entry = batch[name].clone()
    place_of = (place,) if entry.ndim - entry.is_floating_point() == 1 else (row, place)
    old = entry[place_of]
    if entry.is_floating_point():
        entry[place_of] = old + 1
        return {**batch, name: entry}
    others = [value for value in entry.unique().tolist() if value >= 0 and value != int(old)]
    if int(old) < 0 or not others:
        return None
    entry[place_of] = others[place % len(others)]
    return {**batch, name: entry}


def with_local_positions(batch: Mapping[str, Any], name: str, shards: Shards) -> dict[str, Any]:
    """The batch with the positions that result if each rank counts its own tokens from 0."""
    entry = batch[name].clone()
    for positions in shards.positions:
        at = torch.from_numpy(positions).to(entry.device)
        entry[..., at] = torch.arange(len(positions), dtype=entry.dtype, device=entry.device)
    return {**batch, name: entry}
