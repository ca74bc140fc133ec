"""torch's own fused attention on CPU: the flash kernel behind ``scaled_dot_product_attention``.

The kernel knows three shapes (no mask, a causal square, an additive mask), so slices are cut into
tiles of those shapes; a row that several tiles attend is merged in fp32. ALiBi is an additive mask
too, one per head, so its tiles are small. The kernel cannot cap scores, and its dropout mask can be
neither read nor given.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...mask.slices import K0, K1, Q0, Q1, Slices, clip
from ...merge.merge import accumulation_dtype
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring, Tokens
from ..window import tiled
from ..window.columns import (
    cut_to,
    first_columns,
    inputs_of_same_width,
    operands_of_same_width,
    widened,
)
from ..window.tiled import Tile, Tiling

CAPABILITIES = Capabilities(
    device="cpu",
    dtypes=(torch.float64, torch.float32, *HALF),
    features=("alibi", "window", "lse gradient", "deterministic", "64-bit indices"),
)

# Rows of a tile that needs an additive mask: bounds the mask to BAND_ROWS x (band + BAND_ROWS).
BAND_ROWS = 256
# Keys of a tile under ALiBi: bounds the mask to BAND_ROWS x BIAS_KEYS per head.
BIAS_KEYS = 512


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
    given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    padded, v_dim = inputs_of_same_width(given), given.v.shape[-1]  # v must be as wide as q

    def attend(tile: Tile) -> OutLse:
        q, k, v = padded.part(tile.rows, tile.keys)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            0.0,
            tile.causal,
            attn_mask=_additive(tile, q, scoring, tokens),
            scale=scoring.softmax_scale,
        )
        # The op stores lse as [b, i, h]; arithmetic in another order is rounded differently.
        return first_columns(out.transpose(1, 2), v_dim), lse.contiguous()

    wide = accumulation_dtype(given.q.dtype)
    return tiled.forward(attend, given, _tiling(pairs, scoring), wide)


def backward(
    given: BackwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None, **_: bool
) -> Grads:
    padded = operands_of_same_width(widened(given))

    def attend_backward(tile: Tile) -> Grads:
        part = padded.part(tile.rows, tile.keys)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(t.transpose(1, 2) for t in part[:5]),
            part.lse,
            0.0,
            tile.causal,
            attn_mask=_additive(tile, part.q, scoring, tokens),
            scale=scoring.softmax_scale,
        )
        return cut_to((grad.transpose(1, 2) for grad in grads), given)

    wide = accumulation_dtype(given.q.dtype)
    return tiled.backward(attend_backward, given, _tiling(pairs, scoring), wide)


def _tiling(pairs: Pairs, scoring: Scoring) -> Tiling:
    cutter = tiles if scoring.alibi_slopes is None else bias_tiles
    return pairs.made(cutter, lambda: Tiling.of(cutter(pairs.slices), pairs))


def _additive(tile: Tile, q: Tensor, scoring: Scoring, tokens: Tokens | None) -> Tensor | None:
    """What the kernel adds to the tile's scores: [rows, keys] in q's dtype, under ALiBi
    [b or 1, h, rows, keys] in the accumulation dtype, or None."""
    mask = tile.mask(q)
    if scoring.alibi_slopes is None:
        return mask
    assert tokens is not None and mask is not None
    here = tokens.part(tile.rows, tile.keys)
    return scoring.alibi_bias(here, accumulation_dtype(q.dtype)) + mask
