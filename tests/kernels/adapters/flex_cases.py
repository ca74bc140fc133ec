"""Masks and scorings for flex_attention, and a dense stand-in for it."""

from __future__ import annotations

import pytest
import torch
import windows
from torch import Tensor

from customized_ops.ring_attention.core.kernels import Scoring
from customized_ops.ring_attention.core.mask import AttnMask
from tests.kernels import small_cases
from tests.kernels.small_cases import SCALE, SLOPES

SCORINGS = {name: small_cases.SCORINGS[name] for name in ("plain", "softcap", "alibi")}
SCORINGS["both"] = Scoring(SCALE, softcap=1.5, alibi_slopes=SLOPES)


def stripes(rows: int, keys: int, width: int) -> AttnMask:
    """Every other ``width`` keys: more intervals of keys in a row than one call takes."""
    return AttnMask.from_slices(
        [(3, rows, k, k + width, -keys, keys) for k in range(0, keys - width, 2 * width)],
        rows,
        keys,
    )


MASKS = {
    "full": AttnMask.full(128, 256),
    "full, ends within blocks": AttnMask.full(300, 700),
    "causal": AttnMask.causal(300, 340),
    "window": AttnMask.dense(290, window=(70, 5)),
    "documents": AttnMask.varlen([0, 100, 101, 280, 300], causal=True),
    "uncovered rows": AttnMask.from_slices([(140, 200, 7, 130, -999, 999)], 260, 150),
    "few tokens": AttnMask.causal(3, 5),
    "stripes": stripes(150, 260, 6),
    "nothing": AttnMask.from_slices([], 20, 30),
}
over_masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
over_scorings = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)


def draw(mask: AttnMask, d: int, e: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, dout and, in fp64, dlse: of four heads of q and two of k."""
    *drawn, dlse = windows.draw(2, mask.q_len, mask.k_len, 2, d, e)
    return [*(t.to(dtype) for t in drawn), dlse]
