"""Do two slices of a list share a pair?

Seen along one direction (queries, keys or diagonals) a slice is an interval, and only slices whose
intervals meet can share a pair. Packed documents never meet along the queries, tiles of a block
mask seldom do, and the bands of a strided mask never meet along the diagonals; so the direction
with the fewest meetings is searched, and each candidate in it is tested exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..arrays import Ints
from .mask_arguments import MaskError
from .slices import HI, K0, K1, LO, Q0, Q1, Slices, tighten

# Candidates tested at a time: bounds the memory to some 10 MB.
CHUNK = 1 << 16


def first_overlap(slices: Slices) -> tuple[int, int] | None:
    """The smallest (a, b), a < b, such that slices a and b share a pair; None if none do.

    Args:
        slices: int64[n, 6], any bounds; empty slices share nothing.
    """
    intervals = [(slices[:, Q0], slices[:, Q1]), (slices[:, K0], slices[:, K1])]
    intervals.append((slices[:, LO], slices[:, HI] + 1))
    searches = [_meetings(start, stop) for start, stop in intervals]
    order, meetings = min(searches, key=lambda search: int(search[1].sum()))
    found = len(slices) ** 2  # a * n + b orders pairs as (a, b) does
    for x, y in _candidates(meetings):
        a, b = np.minimum(order[x], order[y]), np.maximum(order[x], order[y])
        hit = _share_a_pair(slices[a], slices[b])
        found = int((a * len(slices) + b)[hit].min(initial=found))
    return divmod(found, len(slices)) if found < len(slices) ** 2 else None


def require_disjoint(slices: Slices, name: Callable[[int], str]) -> None:
    """Refuse a list that covers a pair twice.

    Raises:
        MaskError: two slices share a pair; names both as ``name`` does.
    """
    twice = first_overlap(tighten(slices))
    if twice is not None:
        a, b = (name(n) for n in twice)
        raise MaskError(f"{a} and {b} cover the same pairs; a mask is a disjoint list")


def _meetings(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Intervals by start: their order, and for each how many of the following ones it meets."""
    order = np.argsort(start, kind="stable")
    until = np.searchsorted(start[order], stop[order], side="left")
    return order, np.maximum(until - np.arange(1, len(order) + 1), 0)


def _candidates(meetings: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Each pair (x, y), x < y <= x + meetings[x], in chunks."""
    end = np.cumsum(meetings)
    total = int(end[-1]) if len(end) else 0
    for at in range(0, total, CHUNK):
        pair = np.arange(at, min(at + CHUNK, total))
        x = np.searchsorted(end, pair, side="right")
        yield x, x + 1 + pair - (end[x] - meetings[x])


def _share_a_pair(a: Slices, b: Slices) -> np.ndarray:
    """bool[n]: do a[n] and b[n] share a pair? The intersection of two slices is a slice."""
    low, high = [Q0, K0, LO], [Q1, K1, HI]
    q0, k0, lo = np.maximum(a[:, low], b[:, low]).T
    q1, k1, hi = np.minimum(a[:, high], b[:, high]).T
    return (q0 < q1) & (lo <= hi) & (np.maximum(k0, q0 + lo) < np.minimum(k1, q1 + hi))
