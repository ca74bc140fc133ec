"""Masks of every class of speed, for every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from customized_ops.ring_attention import AttnMask

WIDE = 1 << 30  # wider than any sequence: no bound


def _packed(n: int, causal: bool) -> AttnMask:
    """Documents of odd lengths, two of them one token long."""
    lengths = np.array([1, n // 3 | 1, 7, 1, n // 4 | 1, 33])
    bounds = np.concatenate([[0], np.cumsum(lengths), [n]])
    return AttnMask.varlen(bounds, causal=causal)


def _blocks(n: int) -> AttnMask:
    """A seeded half of all blocks of 32 x 32; the last ones are cut."""
    count = -(-n // 32)
    chosen = np.random.default_rng(0).random((count, count)) < 0.5
    return AttnMask.from_block_mask(chosen, 32, n, n)


def _cut(n: int) -> AttnMask:
    """Rows and keys in the middle of a longer causal sequence: the diagonal meets no corner."""
    return AttnMask.from_slices([(0, n // 2, 0, 5 * n // 8, -WIDE, n // 4)], n // 2, 5 * n // 8)


def _holes(n: int) -> AttnMask:
    """Rows without keys at both ends and between, keys without rows too."""
    return AttnMask.from_slices(
        [
            (n // 8, n // 3, n // 4, n // 2, -WIDE, WIDE),
            (n // 2, n - 9, n // 2, n - 5, -WIDE, 0),
        ],
        n,
        n,
    )


def _shared_rows(n: int) -> AttnMask:
    """Up to three slices a row, with other diagonals."""
    a, b = n // 5, n // 2
    return AttnMask.from_slices(
        [
            (0, n, 0, a, -WIDE, WIDE),
            (a, n, a, b, -WIDE, 3),
            (n // 3, n - 7, b + 5, n, n // 8, n // 4),
        ],
        n,
        n,
    )


@dataclass(frozen=True)
class Shape:
    """What a mask is to a kernel: its class of speed, and how to make it for n tokens."""

    shape_class: str
    make: Callable[[int], AttnMask]


MASKS = {
    "full": Shape("full", AttnMask.full),
    "causal": Shape("causal", AttnMask.causal),
    "causal, more keys": Shape("causal", lambda n: AttnMask.causal(n // 2, n)),
    "causal, cut": Shape("causal", _cut),
    "window back": Shape("window", lambda n: AttnMask.dense(n, window=(n // 8, 0))),
    "window both sides": Shape("window", lambda n: AttnMask.dense(n, window=(n // 8, n // 16))),
    "packed": Shape("packed", lambda n: _packed(n, causal=True)),
    "packed full": Shape("packed", lambda n: _packed(n, causal=False)),
    "blocks": Shape("sparse", _blocks),
    "streaming": Shape("sparse", lambda n: AttnMask.streaming(n, n // 8, 5)),
    "prefix-LM": Shape("sparse", lambda n: AttnMask.prefix_lm(n, n // 3)),
    "rows without keys": Shape("sparse", _holes),
    "slices that share rows": Shape("sparse", _shared_rows),
}
