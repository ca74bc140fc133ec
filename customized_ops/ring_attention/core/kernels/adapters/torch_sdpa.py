"""torch's own fused attention on CPU: the flash kernel behind ``scaled_dot_product_attention``.

The kernel knows three shapes (no mask, a causal square, an additive mask), so slices are cut into
tiles of those shapes; a row that several tiles attend is merged in fp32. ALiBi is an additive mask
too, one per head, so its tiles are small. The kernel cannot cap scores, and its dropout mask can be
neither read nor given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...mask.slices import K0, K1, Q0, Q1, Slices, clip
from ...merge import merge_
from ...merge.merge import accumulation_dtype, unattended
from ..operands import BackwardOperands, Grads, OutLse, Pairs
from ..protocol import HALF, Capabilities
from ..scoring import Scoring, Tokens
from ..window.columns import operands_of_same_width, same_width, widened
from ..window.spans import Spans

CAPABILITIES = Capabilities(
    device="cpu",
    dtypes=(torch.float64, torch.float32, *HALF),
    features=("alibi", "window", "lse gradient", "deterministic", "64-bit indices"),
)

# Rows of a tile that needs an additive mask: bounds the mask to BAND_ROWS x (band + BAND_ROWS).
BAND_ROWS = 256
# Keys of a tile under ALiBi: bounds the mask to BAND_ROWS x BIAS_KEYS per head.
BIAS_KEYS = 512


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
        """The rows, as an index."""
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        """The keys, as an index."""
        return slice(self.k0, self.k1)

    def mask(self, like: Tensor) -> Tensor | None:
        """Additive mask [rows, keys], or None."""
        if self.band is None:
            return None
        i = torch.arange(self.q0, self.q1).unsqueeze(1)
        diagonal = torch.arange(self.k0, self.k1).unsqueeze(0) - i
        keep = (diagonal >= self.band[0]) & (diagonal <= self.band[1])
        return like.new_zeros(keep.shape).masked_fill_(~keep, -torch.inf)


def tiles(slices: Slices) -> Iterator[Tile]:
    """Cut normalised slices into tiles."""
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        open_left, open_right = lo <= k0 - q1 + 1, hi >= k1 - 1 - q0
        if open_left and open_right:
            yield Tile(q0, q1, k0, k1)
        elif open_left and hi == k1 - q1:
            corner = k1 - (q1 - q0)
            if k0 < corner:
                yield Tile(q0, q1, k0, corner)
            yield Tile(q0, q1, corner, k1, causal=True)
        else:
            for a in range(q0, q1, BAND_ROWS):
                b = min(a + BAND_ROWS, q1)
                yield Tile(a, b, max(k0, a + lo), min(k1, b + hi), band=(lo, hi))


def bias_tiles(slices: Slices) -> Iterator[Tile]:
    """Cut normalised slices into tiles of at most BAND_ROWS x BIAS_KEYS."""
    for one in slices[:, None]:
        for a in range(one[0, Q0], one[0, Q1], BAND_ROWS):
            strip = clip(one, a, a + BAND_ROWS, one[0, K0], one[0, K1])
            for c in range(strip[0, K0], strip[0, K1], BIAS_KEYS):
                piece = clip(strip, a, a + BAND_ROWS, c, c + BIAS_KEYS)
                q0, q1, k0, k1, lo, hi = piece[0].tolist()
                yield Tile(q0, q1, k0, k1, band=(lo, hi))


def forward(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    cut, merging = _cut(pairs, scoring)
    wide = accumulation_dtype(q.dtype)
    out, lse = unattended(q, v.shape[-1], wide if merging else q.dtype)
    q_, k_, v_ = same_width(q, k, v)  # the kernel wants v as wide as q
    for tile in cut:
        rows, keys = tile.rows, tile.keys
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_[:, rows].transpose(1, 2),
            k_[:, keys].transpose(1, 2),
            v_[:, keys].transpose(1, 2),
            0.0,
            tile.causal,
            attn_mask=_additive(tile, q, scoring, tokens),
            scale=scoring.softmax_scale,
        )
        part = part.transpose(1, 2)[..., : v.shape[-1]]
        if merging:
            merge_(out[:, rows], lse[..., rows], part.to(wide), part_lse)
        else:
            out[:, rows] = part
            lse[..., rows] = part_lse
    return out, lse


def backward(
    given: BackwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None, **_: bool
) -> Grads:
    q, wide = given.q, accumulation_dtype(given.q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, given.k, given.v))
    given = operands_of_same_width(widened(given))
    for tile in _cut(pairs, scoring)[0]:
        rows, keys = tile.rows, tile.keys
        part = given.part(rows, keys)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(t.transpose(1, 2) for t in part[:5]),
            part.lse,
            0.0,
            tile.causal,
            attn_mask=_additive(tile, q, scoring, tokens),
            scale=scoring.softmax_scale,
        )
        for total, grad, where in zip((dq, dk, dv), grads, (rows, keys, keys), strict=True):
            total[:, where] += grad.transpose(1, 2)[..., : total.shape[-1]]
    return dq, dk, dv


def _cut(pairs: Pairs, scoring: Scoring) -> tuple[list[Tile], bool]:
    """The tiles, and whether some row is in several. If none is, nothing needs to be merged and
    results are written as they come."""
    cutter = tiles if scoring.alibi_slopes is None else bias_tiles

    def make() -> tuple[list[Tile], bool]:
        cut = list(cutter(pairs.slices))
        return cut, Spans.of([(tile.q0, tile.q1) for tile in cut], pairs.q_len).most > 1

    return pairs.made(cutter, make)


def _additive(tile: Tile, q: Tensor, scoring: Scoring, tokens: Tokens | None) -> Tensor | None:
    """What the kernel adds to the tile's scores: [rows, keys] in q's dtype, under ALiBi
    [b or 1, h, rows, keys] in the accumulation dtype, or None."""
    mask = tile.mask(q)
    if scoring.alibi_slopes is None:
        return mask
    assert tokens is not None and mask is not None
    here = tokens.part(tile.rows, tile.keys)
    return scoring.alibi_bias(here, accumulation_dtype(q.dtype)) + mask
