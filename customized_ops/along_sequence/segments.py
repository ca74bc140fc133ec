"""Which tokens of a document are consecutive on a rank, and which rank holds the ones before them.

A segment is a run of tokens of one document that one rank holds. An op that runs along a document
goes through its segments in order, from rank to rank:

    zigzag over 2 ranks     a a|a a a b|b b      rank 0 holds tokens 0 1 6 7, rank 1 holds 2 3 4 5
    document a              0..1 on rank 0, then 2..4 on rank 1
    document b              5 on rank 1, then 6..7 on rank 0

A rank processes its tokens in the order of the sequence, whatever the order of its layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..ring_attention.core.arrays import Bools, Ints, columns
from ..ring_attention.core.comm.signals import of_call, of_tables
from ..ring_attention.core.index_table import IndexTable
from ..ring_attention.core.layout import Layout
from ..ring_attention.core.mask.intervals import runs


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of a sequence, in its order; the same on every rank.

    Attributes:
        layout: which rank holds which tokens.
        ends: int64[documents + 1], cumulative lengths of the documents, of which some may be empty.
        ranges: int64[m, 3]: rank, start, stop: maximal runs of tokens on one rank, sorted by start.
        rank, document, start, stop: int64[n], for each segment; token indices are global.
    """

    layout: Layout
    ends: Ints
    ranges: Ints
    rank: Ints
    document: Ints
    start: Ints
    stop: Ints

    @cached_property
    def first(self) -> Bools:
        """bool[n]: whether a segment begins its document."""
        return self.start == self.ends[self.document]

    @cached_property
    def last(self) -> Bools:
        """bool[n]: whether a segment ends its document."""
        return self.stop == self.ends[self.document + 1]

    @cached_property
    def chained(self) -> Ints:
        """int64[k]: the segments of documents that have several segments."""
        return np.flatnonzero(~(self.first & self.last))

    @cached_property
    def without_tokens(self) -> IndexTable:
        """The documents that are empty."""
        return IndexTable(np.flatnonzero(np.diff(self.ends) == 0))

    @cached_property
    def _tables(self) -> int:
        return of_tables([self.ends], [self.layout.table])

    def fingerprint(self, *call: object) -> int:
        """A fingerprint of a pass over these segments, which ranks compare where data moves."""
        return of_call(self._tables, *call)

    def local(self, rank: int) -> LocalSegments:
        """The segments of one rank."""
        return _local(self, rank)


@dataclass(frozen=True, eq=False)
class LocalSegments:
    """The segments of one rank.

    Attributes:
        number: int64[m], each segment's index among all segments.
        document: int64[m]. first, last: bool[m], as in :class:`Segments`.
        chained: bool[m]: whether its document has several segments.
        ends: int64[m + 1], cumulative lengths: where the segments are among the rank's tokens in
            the order of the sequence.
        order: the rank's tokens in the order of the sequence; None where that is the layout's.
        back: the inverse: from that order to the layout's.
        entries: number of the rank's ranges that begin after the sequence's first token. A segment
            that continues another rank's tokens begins one of them.
        entry: int64[m], which of these ranges a segment begins; -1 where it begins none.
    """

    number: Ints
    document: Ints
    first: Bools
    last: Bools
    chained: Bools
    ends: Ints
    order: IndexTable | None
    back: IndexTable | None
    entries: int
    entry: Ints

    def __len__(self) -> int:
        return len(self.number)

    @cached_property
    def begun(self) -> tuple[IndexTable, IndexTable]:
        """The segments that begin a document, and these documents."""
        return _with_documents(self, self.first)

    @cached_property
    def ended(self) -> tuple[IndexTable, IndexTable]:
        """The segments that end a document, and these documents."""
        return _with_documents(self, self.last)


def _with_documents(local: LocalSegments, which: Bools) -> tuple[IndexTable, IndexTable]:
    return IndexTable(np.flatnonzero(which)), IndexTable(local.document[which])


@lru_cache(maxsize=64)
def _segments(layout: Layout, ends: bytes) -> Segments:
    bounds = np.frombuffer(ends, np.int64)
    rank, start, stop, _ = layout.pieces.T
    heads, lasts = runs(rank[1:] != rank[:-1], len(rank))
    ranges = columns(rank[heads], start[heads], stop[lasts])
    begin = np.unique(np.concatenate([ranges[:, 1], bounds[(bounds > 0) & (bounds < bounds[-1])]]))
    of_range = np.searchsorted(ranges[:, 1], begin, side="right") - 1
    document = np.searchsorted(bounds, begin, side="right") - 1
    end = np.append(begin[1:], bounds[-1])[: len(begin)]
    return Segments(layout, bounds, ranges, ranges[of_range, 0], document, begin, end)


def segments_of(layout: Layout, ends: Ints) -> Segments:
    """The segments of documents with cumulative lengths ``ends`` in a layout."""
    return _segments(layout, np.ascontiguousarray(ends, np.int64).tobytes())


def entries_of(layout: Layout, rank: int) -> int:
    """:attr:`LocalSegments.entries`, which does not depend on the documents."""
    one = np.array([0, layout.total], np.int64)
    return segments_of(layout, one).local(rank).entries


@lru_cache(maxsize=256)
def _local(segments: Segments, rank: int) -> LocalSegments:
    number = np.flatnonzero(segments.rank == rank)
    ranges = segments.ranges[(segments.ranges[:, 0] == rank) & (segments.ranges[:, 1] > 0)]
    start = segments.start[number]
    at = np.searchsorted(ranges[:, 1], start)
    known = at < len(ranges)
    entry = np.full(len(number), -1, dtype=np.int64)
    begins = np.flatnonzero(known)[ranges[at[known], 1] == start[known]]
    entry[begins] = at[begins]
    positions = segments.layout.positions(rank)
    order = np.argsort(positions, kind="stable")
    sorted_already = bool((positions[1:] > positions[:-1]).all())
    length = segments.stop[number] - start
    return LocalSegments(
        number=number,
        document=segments.document[number],
        first=segments.first[number],
        last=segments.last[number],
        chained=np.isin(number, segments.chained),
        ends=np.concatenate([[0], np.cumsum(length)]).astype(np.int64),
        order=None if sorted_already else IndexTable(order),
        back=None if sorted_already else IndexTable(np.argsort(order)),
        entries=len(ranges),
        entry=entry,
    )
