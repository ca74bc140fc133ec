"""Masks and scorings for flex_attention, and a dense stand-in for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import windows
from torch import Tensor

from customized_ops.ring_attention.core.kernels import Pairs, Scoring, Tokens
from customized_ops.ring_attention.core.mask import AttnMask

SCALE = 0.3
SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.03], [0.4, 0.0, 0.2, 0.05]])
SCORINGS = {
    "plain": Scoring(SCALE),
    "softcap": Scoring(SCALE, softcap=1.5),
    "alibi": Scoring(SCALE, alibi_slopes=SLOPES[:1]),
    "both": Scoring(SCALE, softcap=1.5, alibi_slopes=SLOPES),
}


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


def pairs_of(mask: AttnMask) -> Pairs:
    return Pairs(mask.slices, mask.q_len, mask.k_len)


def tokens_of(mask: AttnMask, device: str = "cpu") -> Tokens:
    rows = 50 + torch.arange(mask.q_len, device=device)
    keys = 20 + torch.arange(mask.k_len, device=device)
    return Tokens(rows, keys, keys + 27, first_head=0)


def for_dense(scoring: Scoring, mask: AttnMask) -> dict[str, Any]:
    tokens = tokens_of(mask)
    return {
        "softcap": scoring.softcap,
        "alibi_slopes": scoring.alibi_slopes,
        "key_positions": tokens.key_positions - 50,
    }
