"""Arithmetic of band slices.

A slice ``(q0, q1, k0, k1, lo, hi)`` is the set of pairs (i, j) with

    q0 <= i < q1,   k0 <= j < k1,   lo <= j - i <= hi

where i and j are token indices of the query and the key sequence; a list of them is an
``int64[n, 6]`` array. Slices are closed under what the planner does: cutting a query range or a key
range clips bounds and leaves the band alone, and renumbering tokens shifts it, so no step of the
planner knows what "causal" or "window" means.

No torch here: masks, layouts and plans are host-side arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import Ints, columns
from .intervals import spread, touched

Slices = npt.NDArray[np.int64]  # [n, 6]: q0, q1, k0, k1, lo, hi

Q0, Q1, K0, K1, LO, HI = range(6)

# Stands for "no bound" while a mask is being built; normalise() replaces it by the tight bound.
UNBOUNDED = 1 << 40


def as_slices(rows: Sequence[Sequence[int]] | Slices) -> Slices:
    """``rows`` as an int64[n, 6] array (n may be 0)."""
    return np.asarray(rows, dtype=np.int64).reshape(-1, 6)


def normalise(slices: Slices) -> Slices:
    """The same pairs with every bound tight, empty slices dropped; the order stays."""
    tight = tighten(slices)
    q0, q1, k0, k1, lo, hi = tight.T
    return tight[(q0 < q1) & (k0 < k1) & (lo <= hi)]


def tighten(slices: Slices) -> Slices:
    """The same slices with every bound tight; empty ones stay, empty.

    Afterwards each row has at least one key and each key at least one row:
    k1 <= q1 + hi, k0 >= q0 + lo, q1 <= k1 - lo, q0 >= k0 - hi. This is what lets FlashAttention's
    bottom-right-aligned window describe a slice: left = (k1 - q1) - lo, right = hi - (k1 - q1).

    One pass is enough: trimming queries by the trimmed keys moves k1 - hi and k0 - lo by at most
    hi - lo >= 0, so the key bounds stay tight.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    k1 = np.minimum(k1, q1 + hi)
    k0 = np.maximum(k0, q0 + lo)
    q1 = np.minimum(q1, k1 - lo)
    q0 = np.maximum(q0, k0 - hi)
    return _with_tight_band(q0, q1, k0, k1, lo, hi)


def _with_tight_band(q0: Ints, q1: Ints, k0: Ints, k1: Ints, lo: Ints, hi: Ints) -> Slices:
    """A band wider than the rectangle says nothing more: clamp it to the corners."""
    return columns(q0, q1, k0, k1, np.maximum(lo, k0 - q1 + 1), np.minimum(hi, k1 - 1 - q0))


def clip(slices: Slices, q0: int, q1: int, k0: int, k1: int) -> Slices:
    """The part of ``slices`` inside queries [q0, q1) and keys [k0, k1), normalised."""
    out = slices.copy()
    out[:, [Q0, K0]] = np.maximum(out[:, [Q0, K0]], (q0, k0))
    out[:, [Q1, K1]] = np.minimum(out[:, [Q1, K1]], (q1, k1))
    return normalise(out)


def cut_rows(slices: Slices, tiles: Ints) -> tuple[Ints, Ints, Slices]:
    """``slices`` cut at row ranges.

    Args:
        slices: normalised int64[n, 6].
        tiles: int64[m, 2], sorted disjoint row ranges.
    Returns:
        (index of the slice, index of the tile, the part), the parts normalised.
    """
    x, tile = spread(*touched(slices[:, Q0], slices[:, Q1], tiles))
    return x, tile, clip_each(slices[x], tiles[tile], Q0)


def cut_keys(slices: Slices, tiles: Ints) -> tuple[Ints, Ints, Slices]:
    """As :func:`cut_rows`, at key ranges."""
    x, tile = spread(*touched(slices[:, K0], slices[:, K1], tiles))
    return x, tile, clip_each(slices[x], tiles[tile], K0)


def clip_each(slices: Slices, ranges: Ints, start: int) -> Slices:
    """Each of ``slices`` inside its own range, int64[n, 2], of queries (``start`` is Q0) or of keys
    (K0), normalised. The given slices must be normalised, so that every row and every key has a
    pair, and each must meet its range. Then none becomes empty."""
    q0, q1, k0, k1, lo, hi = slices.T
    if start == Q0:
        q0, q1 = np.maximum(q0, ranges[:, 0]), np.minimum(q1, ranges[:, 1])
        k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    else:
        k0, k1 = np.maximum(k0, ranges[:, 0]), np.minimum(k1, ranges[:, 1])
        q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    return _with_tight_band(q0, q1, k0, k1, lo, hi)


def shift(slices: Slices, q_by: int, k_by: int) -> Slices:
    """``slices`` with query indices moved by ``q_by`` and key indices by ``k_by``."""
    return slices + np.array([q_by, q_by, k_by, k_by, k_by - q_by, k_by - q_by], dtype=np.int64)


def areas(slices: Slices) -> Ints:
    """Number of pairs in each slice of a normalised list, int64[n]."""
    q0, q1, k0, k1, lo, hi = slices.T
    # The whole rectangle, less the triangles above and below the band, which have so many rows.
    above, below = k1 - 1 - q0 - hi, lo - (k0 - q1 + 1)
    return (q1 - q0) * (k1 - k0) - (above * (above + 1) + below * (below + 1)) // 2


def to_dense(slices: Slices, q_len: int, k_len: int) -> npt.NDArray[np.bool_]:
    """bool[q_len, k_len], True where a pair is attended."""
    dense = np.zeros((q_len, k_len), dtype=bool)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        diagonal = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        dense[q0:q1, k0:k1] |= (diagonal >= lo) & (diagonal <= hi)
    return dense
