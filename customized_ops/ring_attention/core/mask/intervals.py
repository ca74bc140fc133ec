"""Joining and merging integer ranges, without loops over them."""

from __future__ import annotations

import numpy as np

from ..arrays import Bools, Ints, columns


def spread(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """All n in first[x] .. last[x] - 1, for each x.

    Returns:
        (x, n), both int64[t], by x and then by n; a range with last <= first gives nothing.
    """
    count = np.maximum(last - first, 0)
    x = np.arange(len(first)).repeat(count)
    before = count.cumsum() - count
    return x, np.arange(len(x)) - (before - first)[x]


def members(start: Ints, stop: Ints) -> Ints:
    """All n in start[x] .. stop[x] - 1, for each x, int64[t]; no range stops before it starts."""
    length = stop - start
    before = length.cumsum() - length
    return (start - before).repeat(length) + np.arange(length.sum())


def touched(start: Ints, stop: Ints, tiles: Ints) -> tuple[Ints, Ints]:
    """Which tiles each range meets: tiles first[x] .. last[x] - 1.

    Args:
        start, stop: int64[n], ranges that are not empty, in any order.
        tiles: int64[m, 2], disjoint ranges that are not empty, sorted.
    """
    return tiles[:, 1].searchsorted(start, side="right"), tiles[:, 0].searchsorted(stop)


def union(group: Ints, start: Ints, stop: Ints) -> Ints:
    """Merge the ranges of each group.

    Returns:
        int64[m, 3]: group, start, stop; sorted, and disjoint and apart within a group.
    """
    if len(start) == 0:
        return np.zeros((0, 3), dtype=np.int64)
    # One number line for all groups: each is one stride, with a gap, after the group before it.
    base = int(start.min())
    stride = int(stop.max()) - base + 1
    line = group * stride - base
    start, stop = start + line, stop + line
    order = start.argsort(kind="stable")
    start, stop = start[order], stop[order]
    heads, _ = runs(start[1:] > np.maximum.accumulate(stop)[:-1], len(start))
    begin, end = start[heads], np.maximum.reduceat(stop, heads)
    start = begin % stride + base
    return columns(begin // stride, start, start + end - begin)


def depth(start: Ints, stop: Ints) -> int:
    """The largest number of ranges that hold the same integer; no range is empty."""
    begun = np.arange(1, len(start) + 1)
    ended = np.sort(stop).searchsorted(np.sort(start), side="right")
    return int((begun - ended).max(initial=0))


def joined(places: Ints) -> Ints:
    """Join rows (start, stop, offset) that continue the one before in both numberings."""
    start, stop, offset = places.T
    apart = (start[1:] != stop[:-1]) | (offset[1:] != (offset + stop - start)[:-1])
    heads, lasts = runs(apart, len(places))
    return columns(start[heads], stop[lasts], offset[heads])


def runs(apart: Bools, count: int) -> tuple[Ints, Ints]:
    """The first row and the last row of each run among ``count`` rows; ``apart``, bool[count - 1],
    says of each row but the first whether a run begins there."""
    (ends,) = apart.nonzero()
    heads, lasts = np.empty(len(ends) + 1, dtype=np.int64), np.empty(len(ends) + 1, dtype=np.int64)
    heads[0], lasts[-1] = 0, count - 1
    heads[1:], lasts[:-1] = ends + 1, ends
    return heads[:count], lasts[:count]
