"""From slices to window calls: the fewest calls of a library that knows windows.

    slices ── join ──> fewer slices ── chain ──> calls

A call is one window over segments that follow one another in rows and in keys, which is what
FlashAttention takes as ``cu_seqlens``. No row and no key is in two segments, so a call needs no
merge of its own and writes every gradient once. The window is aligned to the bottom right corner of
each segment: its row i of n attends key j of m where  i + m - n - left <= j <= i + m - n + right.

No torch here: like masks and plans, calls are host-side arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...arrays import Bools, Ints
from ...index_table import IndexTable
from ...mask.intervals import spread
from ...mask.slices import HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Slices, normalise
from ...rounding import in_steps
from .joining import join

Window = tuple[int, int]  # left, right of the bottom-right diagonal; -1 for no bound
Range = tuple[int, int]  # start, stop

TILE = 128  # rows and keys of the tiles that kernels work in, to count work by
# The least length of tables: their rows all start at multiples of 16 bytes, as flash-attn-4 would
# copy others, and documents are mostly few enough.
LEAST_ENDS = 16
# Rows or keys that a call may leave out between two segments. They are written, as zeros, and some
# backwards hold a tile in fp32 for every piece of them: above this, one more call costs less.
MOST_GAP = 64 * TILE


@dataclass(frozen=True, eq=False)
class WindowCall:
    """One window over some segments.

    Attributes:
        window: that of every segment.
        segments: int64[n, 4], (q0, q1, k0, k1), in order and disjoint in rows and in keys.
        around: how many keys the call has before the first segment, and after the last.
    """

    window: Window
    segments: Ints
    around: tuple[int, int] = (0, 0)

    @cached_property
    def rows(self) -> Range:
        """From the first row to the last."""
        return int(self.segments[0, 0]), int(self.segments[-1, 1])

    @cached_property
    def keys(self) -> Range:
        """From the first key to the last."""
        before, after = self.around
        return int(self.segments[0, 2]) - before, int(self.segments[-1, 3]) + after

    @cached_property
    def skips_rows(self) -> bool:
        """Whether some row of :attr:`rows` is in no segment."""
        return bool((self.segments[1:, 0] > self.segments[:-1, 1]).any())

    @cached_property
    def cu_seqlens(self) -> IndexTable:
        """int32[2, n]: where the m :attr:`lengths` of rows and of keys start and end, followed by
        empty ones; n is LEAST_ENDS or another power of two."""
        return self.cu_seqlens_of(1)

    def cu_seqlens_of(self, batch: int) -> IndexTable:
        """:attr:`cu_seqlens` of ``batch`` batch entries end to end."""
        count = batch * len(self.lengths)
        ends = np.zeros((2, max(in_steps(count + 1, 1), LEAST_ENDS)), dtype=np.int32)
        ends[:, 1 : count + 1] = np.concatenate([self.lengths] * batch).T.cumsum(axis=1)
        ends[:, count + 1 :] = ends[:, count : count + 1]
        return IndexTable(ends)

    @cached_property
    def longest(self) -> Range:
        """The largest number of rows, and of keys, among the :attr:`lengths`."""
        most_rows, most_keys = self.lengths.max(axis=0).tolist()
        return most_rows, most_keys

    @cached_property
    def square(self) -> bool:
        """Whether each of the :attr:`lengths` has as many keys as rows."""
        return bool((self.lengths[:, 0] == self.lengths[:, 1]).all())

    @cached_property
    def tiles(self) -> int:
        """How many tiles of TILE x TILE, counted from each segment's start, the call attends
        something in. Its time is about proportional to this."""
        rows, keys = (self.segments[:, 1::2] - self.segments[:, ::2]).T
        segment, tile = spread(np.zeros_like(rows), -(-rows // TILE))
        rows, keys, start = rows[segment], keys[segment], TILE * tile
        stop = np.minimum(start + TILE, rows)
        left, right = self.window
        first = np.zeros_like(start) if left < 0 else np.maximum(start + keys - rows - left, 0)
        last = keys if right < 0 else np.minimum(stop + keys - rows + right, keys)
        return int((-(-last // TILE) - first // TILE).sum())

    def prepare(self) -> None:
        """Work out now what a library's call is made of."""
        for name in ("rows", "keys", "skips_rows", "cu_seqlens", "longest", "square"):
            getattr(self, name)

    @cached_property
    def lengths(self) -> Ints:
        """Rows and keys, int64[m, 2], of segments that together hold every row and key of the call.

        Rows between two segments become segments without keys, keys between or around them segments
        without rows. None is longer than the longest of the call or a tile: a kernel is launched
        for that.
        """
        starts, stops = self.segments[:, ::2], self.segments[:, 1::2]
        real, skipped = stops - starts, starts[1:] - stops[:-1]
        if not (skipped.any() or any(self.around)):
            return real
        most_rows, most_keys = np.maximum(real.max(axis=0), TILE).tolist()
        before, after = self.around
        out = [_pieces(before, most_keys, 1), real[:1]]
        for n, (rows, keys) in enumerate(skipped.tolist(), 1):
            out += [_pieces(rows, most_rows, 0), _pieces(keys, most_keys, 1), real[n : n + 1]]
        return np.concatenate([*out, _pieces(after, most_keys, 1)])


def lower(slices: Slices, *, gaps: bool = True, wide_right: bool = True) -> tuple[WindowCall, ...]:
    """The calls that attend exactly the pairs of ``slices``, each once; those of most rows first.

    A causal slice whose keys end before its diagonal does (window (-1, right > 0)) is one call with
    that window, or a causal one above a full one. Kernels are somewhat faster without a free
    window, but a second call costs a launch, a copy of the results and a sum of dk and dv. So
    slices are cut only where that makes fewer calls, as among many documents that are each cut
    elsewhere. Cutting at the left bound gains nothing: no kernel knows the shape that is left.

    Args:
        slices: int64[n, 6], normalised and disjoint.
        gaps: whether a call may skip rows and keys, at most MOST_GAP at a time; if not, its
            segments touch.
        wide_right: whether the first row may reach further than the segment has keys, by its right
            bound or, beside a left bound, by having none, as it does where there are more rows than
            keys. If not, such slices are cut: FlashAttention-2 takes no bound wider than the keys
            of the longest segment, and drops those that are.
    """
    joined = join(slices)
    if not wide_right:
        joined = _narrow(joined)
    calls = _chain(joined, gaps, wide_right)
    if len(calls) > 1 and len(cut := _cut_below(joined, _last_key(joined))) > len(joined):
        calls = min(calls, _chain(cut, gaps, wide_right), key=len)
    return tuple(sorted(calls, key=lambda call: call.rows[0] - call.rows[1]))


def with_all_keys(call: WindowCall, count: int) -> WindowCall:
    """``call``, or if it leaves out few of ``count`` keys before its first segment or after its
    last, the same with all keys. Calls that have as many keys then differ less, and gradients of
    all keys are written by the call."""
    first, last = call.keys
    around = first, count - last
    return replace(call, around=around) if 0 < max(around) <= MOST_GAP else call


def _last_key(slices: Slices) -> Ints:
    """int64[n], the row from which on the last key is attended. Above it the right bound is 0 from
    the bottom right corner; below it there is none. A bound that cuts no keys off gives the end of
    the rows."""
    open_right = slices[:, HI] >= slices[:, K1] - 1 - slices[:, Q0]
    return np.where(open_right, slices[:, Q1], slices[:, K1] - slices[:, HI])


def _narrow(slices: Slices) -> Slices:
    """The same pairs in slices none of which needs a right bound of as much as its number of keys
    or, with more rows than keys, a left bound without a right one."""
    right = slices[:, HI] - (slices[:, K1] - slices[:, Q1])
    wide = right >= slices[:, K1] - slices[:, K0]
    slices = _cut_below(slices, np.where(wide, _last_key(slices), slices[:, Q1]))
    # Above the first row that misses the first key, there is no left bound.
    first_missing = slices[:, K0] - slices[:, LO] + 1
    return _cut_below(slices, np.where(_tall(slices), first_missing, slices[:, Q1]))


def _tall(slices: Slices) -> Bools:
    """Which slices have no right bound, and more rows than keys."""
    open_right = slices[:, HI] >= slices[:, K1] - 1 - slices[:, Q0]
    return open_right & (slices[:, Q1] - slices[:, Q0] > slices[:, K1] - slices[:, K0])


def _cut_below(slices: Slices, rows: Ints) -> Slices:
    """Cut each slice in two at its entry of ``rows``; those that it does not split stay whole."""
    cut = (slices[:, Q0] < rows) & (rows < slices[:, Q1])
    if not cut.any():
        return slices
    above, below = slices[cut].copy(), slices[cut].copy()
    above[:, Q1] = below[:, Q0] = rows[cut]
    return normalise(np.concatenate([slices[~cut], above, below]))


def _pieces(length: int, most: int, column: int) -> Ints:
    """``length`` cut into pieces of at most ``most``: int64[n, 2], 0 in the other column."""
    out = np.zeros((-(-length // most), 2), dtype=np.int64)
    out[:, column] = most
    if length % most:
        out[-1, column] = length % most
    return out


class WindowBound(NamedTuple):
    """What a slice needs of one side of its call's window.

    A slice that needs no bound takes any that does not reach it, so documents that are shorter than
    a window, or of one row, go with others.
    """

    exact: int  # the bound, or -1 for none
    least: int  # the least bound that others may need

    @classmethod
    def of(cls, bound: int, most: int, least: int) -> WindowBound:
        """``bound``, or none with ``least`` where it reaches ``most`` and so all keys."""
        return cls(-1, least) if bound >= most else cls(bound, 0)

    def with_(self, other: WindowBound) -> WindowBound | None:
        """What both need, or None if no bound suits both."""
        exact, least = max(self.exact, other.exact), max(self.least, other.least)
        if self.exact != other.exact and min(self.exact, other.exact) >= 0:
            return None
        return WindowBound(exact, least) if exact < 0 or exact >= least else None


@dataclass
class Chain:
    """A call to which segments are still added."""

    segments: list[list[int]]
    left: WindowBound
    right: WindowBound

    def takes(
        self, segment: list[int], left: WindowBound, right: WindowBound, most_gap: int
    ) -> bool:
        """Append a segment if rows, keys and bounds allow it."""
        _, q1, _, k1 = self.segments[-1]
        if not (0 <= segment[0] - q1 <= most_gap and 0 <= segment[2] - k1 <= most_gap):
            return False
        both_left, both_right = self.left.with_(left), self.right.with_(right)
        if both_left is None or both_right is None:
            return False
        self.left, self.right = both_left, both_right
        self.segments.append(segment)
        return True


def _chain(slices: Slices, gaps: bool, wide_right: bool) -> list[WindowCall]:
    """Assigns each slice, from the first row on, to the call whose keys end closest before its own,
    or to a new one."""
    slices = slices[np.lexsort((slices[:, K0], slices[:, Q0]))]
    alone = np.zeros(len(slices), dtype=bool) if wide_right else _tall(slices)
    most_gap = MOST_GAP if gaps else 0
    chains: list[Chain] = []
    stops: list[int] = []  # where the chains' keys end, ascending, as the chains are
    for (q0, q1, k0, k1, lo, hi), no_left in zip(slices.tolist(), alone, strict=True):
        left, right = k1 - q1 - lo, hi - (k1 - q1)
        most_left, most_right = k1 - k0 - 1, q1 - q0 - 1
        bounds = (
            WindowBound.of(left, most_left, UNBOUNDED if no_left else most_left),
            WindowBound.of(right, most_right, most_right),
        )
        segment = [q0, q1, k0, k1]
        near = range(bisect_left(stops, k0 - most_gap), bisect_right(stops, k0))
        for n in reversed(near):
            if chains[n].takes(segment, *bounds, most_gap):
                chain = chains.pop(n)
                stops.pop(n)
                break
        else:
            chain = Chain([segment], *bounds)
        at = bisect_right(stops, k1)
        stops.insert(at, k1)
        chains.insert(at, chain)
    return [
        WindowCall((chain.left.exact, chain.right.exact), np.array(chain.segments))
        for chain in chains
    ]
