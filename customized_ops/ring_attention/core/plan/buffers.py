"""The mask over buffers: from global token indices to positions in local tensors.

A place (start, stop, offset) says that tokens start .. stop - 1 lie in a buffer from offset on. A
slice becomes slices over two buffers by cutting it where places end and shifting it; nothing here
depends on what kind of mask it came from.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Ints, columns
from ..mask.intervals import runs, spread, touched
from ..mask.slices import HI, K0, K1, LO, Q0, Q1, Slices, clip_each, cut_rows

START, STOP, OFFSET = range(3)


def over_buffers(slices: Slices, rows: Ints, keys: Ints) -> Slices:
    """``slices`` over two buffers, as few as can be.

    Args:
        slices: normalised int64[n, 6] in global indices.
        rows, keys: places int64[m, 3] in the query and the key buffer, sorted by start.
    Returns:
        normalised int64[t, 6] in buffer positions, by row and then by key.
    """
    if len(slices) == 0 or len(rows) == 0 or len(keys) == 0:
        return np.zeros((0, 6), dtype=np.int64)
    _, place, parts = cut_rows(slices, rows[:, :OFFSET])
    parts = _moved(parts, q_by=rows[place, OFFSET] - rows[place, START])
    return joined_keys(_over_keys(parts, keys))


def _over_keys(parts: Slices, keys: Ints) -> Slices:
    """``parts``, whose rows are in buffer positions already, cut at the places of keys.

    Places that all rows of a part see whole are not cut apart where they lie side by side in the
    buffer: with short places (stripes) their number would be rows times keys.
    """
    tiles = keys[:, :OFFSET]
    first, last = touched(parts[:, K0], parts[:, K1], tiles)
    whole0 = np.maximum(parts[:, K0], parts[:, Q1] - 1 + parts[:, LO])
    whole1 = np.minimum(parts[:, K1], parts[:, Q0] + parts[:, HI] + 1)
    core0 = np.searchsorted(keys[:, START], whole0, side="left").clip(first, last)
    core1 = np.searchsorted(keys[:, STOP], whole1, side="right").clip(core0, last)
    cut = []
    for begin, end in ((first, core0), (core1, last)):
        x, place = spread(begin, end)
        edge = clip_each(parts[x], tiles[place], K0)
        cut.append(_moved(edge, k_by=keys[place, OFFSET] - keys[place, START]))
    # Runs of places that lie side by side in the buffer.
    length = keys[:, STOP] - keys[:, START]
    heads, lasts = runs(keys[1:, OFFSET] != (keys[:, OFFSET] + length)[:-1], len(keys))
    some = np.flatnonzero(core0 < core1)
    tiles = columns(heads, lasts + 1)
    x, r = spread(*touched(core0[some], core1[some], tiles))
    x = some[x]
    begin, end = np.maximum(core0[x], heads[r]), np.minimum(core1[x] - 1, lasts[r])
    k0, k1 = keys[begin, OFFSET], keys[end, OFFSET] + length[end]
    q0, q1 = parts[x, Q0], parts[x, Q1]
    cut.append(columns(q0, q1, k0, k1, k0 - q1 + 1, k1 - 1 - q0))
    return np.concatenate(cut)


def _moved(parts: Slices, q_by: Ints | int = 0, k_by: Ints | int = 0) -> Slices:
    """``parts``, each with its own shift."""
    q0, q1, k0, k1, lo, hi = parts.T
    band = k_by - q_by
    return columns(q0 + q_by, q1 + q_by, k0 + k_by, k1 + k_by, lo + band, hi + band)


def joined_keys(slices: Slices) -> Slices:
    """Join slices over the same rows whose keys are side by side and which one band describes:
    a rectangle and the triangle right of it are one causal slice."""
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
    heads, lasts = runs(~joins, len(slices))
    out = slices[heads]
    out[:, K1], out[:, HI] = slices[lasts, K1], slices[lasts, HI]
    return out
