"""Runs a library that knows neither windows nor ``cu_seqlens`` over any pairs, tile by tile.

As in ``windowed``, what no earlier tile covers is written where it belongs; where tiles overlap,
out and lse are merged and gradients added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...merge import merge_
from ...merge.merge import unattended
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from .spans import Gradient, Spans


@dataclass(frozen=True)
class Tile:
    """Rows [q0, q1) x keys [k0, k1): all pairs, a causal square, or the band lo <= j - i <= hi."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    band: tuple[int, int] | None = None

    @property
    def rows(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)

    def mask(self, like: Tensor) -> Tensor | None:
        """What is added to the scores of a band, [rows, keys]; None for other tiles."""
        if self.band is None:
            return None
        i = torch.arange(self.q0, self.q1).unsqueeze(1)
        diagonal = torch.arange(self.k0, self.k1).unsqueeze(0) - i
        keep = (diagonal >= self.band[0]) & (diagonal <= self.band[1])
        return like.new_zeros(keep.shape).masked_fill_(~keep, -torch.inf)


@dataclass(frozen=True)
class Tiling:
    """The tiles of some pairs, and which rows and keys they cover."""

    tiles: list[Tile]
    rows: Spans
    keys: Spans

    @classmethod
    def of(cls, tiles: Iterable[Tile], pairs: Pairs) -> Tiling:
        tiles = list(tiles)
        rows = Spans.of([(tile.q0, tile.q1) for tile in tiles], pairs.q_len)
        return cls(tiles, rows, Spans.of([(tile.k0, tile.k1) for tile in tiles], pairs.k_len))


# One call of a library, over a tile.
AttendTile = Callable[[Tile], OutLse]
AttendTileBackward = Callable[[Tile], Grads]


def forward(
    attend: AttendTile, given: ForwardOperands, tiling: Tiling, dtype: torch.dtype | None = None
) -> OutLse:
    """out and lse, shaped as ``given`` says, merged in ``dtype``; None: :meth:`.Spans.dtype`."""
    rows = tiling.rows
    if rows.whole:
        return attend(tiling.tiles[0])
    out, lse = unattended(given.q, given.v.shape[-1], dtype or rows.dtype(given.q.dtype))
    for tile, fresh in zip(tiling.tiles, rows.fresh, strict=True):
        part, part_lse = attend(tile)
        if fresh:
            out[:, tile.rows], lse[..., tile.rows] = part, part_lse
        else:
            merge_(out[:, tile.rows], lse[..., tile.rows], part, part_lse)
    return out, lse


def backward(
    attend_backward: AttendTileBackward,
    given: BackwardOperands,
    tiling: Tiling,
    dtype: torch.dtype | None = None,
) -> Grads:
    """dq, dk and dv, shaped as ``given`` says, added up in ``dtype``."""
    dq = Gradient(given.q, tiling.rows, dtype)
    dk, dv = Gradient(given.k, tiling.keys, dtype), Gradient(given.v, tiling.keys, dtype)
    for n, tile in enumerate(tiling.tiles):
        of_q, of_k, of_v = attend_backward(tile)
        dq.add(n, of_q, dq.total[:, tile.rows])
        dk.add(n, of_k, dk.total[:, tile.keys])
        dv.add(n, of_v, dv.total[:, tile.keys])
    return dq.total, dk.total, dv.total
