"""A mask over buffers that hold some of its tokens.

A place (start, stop, offset) says that a buffer holds tokens start .. stop - 1 from offset on. A
slice becomes slices over two buffers by cutting it where places end and shifting it; nothing here
depends on what kind of mask it came from.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Ints, columns
from ..mask.intervals import runs, spread, touched
from ..mask.slices import HI, K0, K1, LO, Q0, Q1, Slices, clip_each, cut_rows

START, STOP, OFFSET = range(3)  # columns of places
NO_SLICES: Slices = np.zeros((0, 6), dtype=np.int64)
# Slices are cut at all places of keys if that adds at most this many parts.
FEW_CUTS = 1_000


def over_buffers(slices: Slices, rows: Ints, keys: Ints) -> Slices:
    """``slices`` over two buffers, as few as can be.

    Args:
        slices: normalised int64[n, 6] in global indices.
        rows, keys: places int64[m, 3] in the query and the key buffer, sorted by start.
    Returns:
        normalised int64[t, 6] in buffer positions, by row and then by key.
    """
    return over_keys(over_rows(slices, rows), keys)


def over_rows(slices: Slices, rows: Ints) -> Slices:
    """``slices`` with rows in positions of a query buffer; see :func:`over_buffers`."""
    if len(slices) == 0 or len(rows) == 0:
        return NO_SLICES
    _, place, parts = cut_rows(slices, rows[:, :OFFSET])
    return _moved(parts, q_by=rows[place, OFFSET] - rows[place, START])


def over_keys(parts: Slices, keys: Ints) -> Slices:
    """What :func:`over_rows` made, with keys in positions of a key buffer."""
    if len(parts) == 0 or len(keys) == 0:
        return NO_SLICES
    return joined_keys(_over_keys(parts, keys))


def _over_keys(parts: Slices, keys: Ints) -> Slices:
    """``parts``, whose rows are in buffer positions already, cut at the places of keys. If places
    are many, those that all rows of a part see whole and that are neighbours in the buffer are not
    cut apart: with short places (stripes) there would be rows times keys parts."""
    tiles = keys[:, :OFFSET]
    first, last = touched(parts[:, K0], parts[:, K1], tiles)
    if (last - first).sum() <= len(parts) + FEW_CUTS:
        return _at_places(parts, keys, first, last)  # which :func:`joined_keys` joins again
    whole0 = np.maximum(parts[:, K0], parts[:, Q1] - 1 + parts[:, LO])
    whole1 = np.minimum(parts[:, K1], parts[:, Q0] + parts[:, HI] + 1)
    core0 = np.minimum(np.maximum(keys[:, START].searchsorted(whole0), first), last)
    core1 = keys[:, STOP].searchsorted(whole1, side="right")
    core1 = np.minimum(np.maximum(core1, core0), last)
    edges = np.concatenate([first, core1]), np.concatenate([core0, last])
    cut = [_at_places(np.concatenate([parts, parts]), keys, *edges)]
    # Runs of places that are neighbours in the buffer.
    length = keys[:, STOP] - keys[:, START]
    heads, lasts = runs(keys[1:, OFFSET] != (keys[:, OFFSET] + length)[:-1], len(keys))
    (some,) = (core0 < core1).nonzero()
    if len(some) == 0:
        return cut[0]
    tiles = columns(heads, lasts + 1)
    x, r = spread(*touched(core0[some], core1[some], tiles))
    x = some[x]
    begin, end = np.maximum(core0[x], heads[r]), np.minimum(core1[x] - 1, lasts[r])
    k0, k1 = keys[begin, OFFSET], keys[end, OFFSET] + length[end]
    q0, q1 = parts[x, Q0], parts[x, Q1]
    cut.append(columns(q0, q1, k0, k1, k0 - q1 + 1, k1 - 1 - q0))
    return np.concatenate(cut)


def _at_places(parts: Slices, keys: Ints, first: Ints, last: Ints) -> Slices:
    """Each of ``parts`` cut at its places of keys, first .. last - 1, and in their positions."""
    x, place = spread(first, last)
    cut = clip_each(parts[x], keys[place, :OFFSET], K0)
    return _moved(cut, k_by=keys[place, OFFSET] - keys[place, START])


def _moved(parts: Slices, q_by: Ints | int = 0, k_by: Ints | int = 0) -> Slices:
    """``parts``, each with its own shift."""
    q0, q1, k0, k1, lo, hi = parts.T
    band = k_by - q_by
    return columns(q0 + q_by, q1 + q_by, k0 + k_by, k1 + k_by, lo + band, hi + band)


def joined_keys(slices: Slices) -> Slices:
    """Join slices over the same rows whose keys are side by side and which one band describes:
    a rectangle and the triangle right of it are one causal slice."""
    if len(slices) < 2:
        return slices
    slices = slices[np.lexsort((slices[:, K0], slices[:, Q1], slices[:, Q0]))]
    left, right = slices[:-1], slices[1:]
    q0, q1, edge = left[:, Q0], left[:, Q1], left[:, K1]
    joins = (
        (q0 == right[:, Q0])
        & (q1 == right[:, Q1])
        & (edge == right[:, K0])
        & (left[:, HI] >= edge - 1 - q0)  # every row sees the left one up to its edge,
        & (right[:, LO] <= edge - q1 + 1)  # and the right one from its edge on,
        & (right[:, HI] >= edge - 1 - q0)  # and neither band cuts into the other
        & (left[:, LO] <= edge - q1 + 1)
    )
    if not joins.any():
        return slices
    heads, lasts = runs(~joins, len(slices))
    out = slices[heads]
    out[:, K1], out[:, HI] = slices[lasts, K1], slices[lasts, HI]
    return out
