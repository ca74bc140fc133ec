"""Which tokens of a tensor leave for peers, or arrive from them: of each peer, and as lists of
several peers' tokens, so that one kernel packs, places or adds up all of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Ints
from ...index_table import IndexTable
from ...mask.intervals import members, runs

# Up to this many ranges, a loop is several times as fast as arrays (for 7: 12 us against 41). A
# batch of packed documents on 8 ranks has 16 lists of 1 to 13.
FEW = 32


@dataclass(frozen=True, eq=False)
class Where:
    """Which ``count`` tokens of a tensor: those from ``start`` on, or those of ``ranges``, starts
    and stops, int64[n] each."""

    start: int
    count: int
    ranges: tuple[Ints, Ints] | None = None

    @cached_property
    def indices(self) -> Ints | None:
        """int64[count]: the indices of scattered tokens."""
        return None if self.ranges is None else members(*self.ranges)

    @cached_property
    def table(self) -> IndexTable:
        """``indices``, for devices."""
        assert self.indices is not None
        return IndexTable(self.indices)

    @property
    def pieces(self) -> tuple[Ints, Ints]:
        """Starts and stops of its ranges, of one too."""
        if self.ranges is not None:
            return self.ranges
        return np.array([self.start]), np.array([self.start + self.count])


class Sums(NamedTuple):
    """Which rows of a list are to be added up, as :func:`.merge.rows.sum_rows` takes it.

    Attributes:
        tables: tokens, int64[t], those of the list, each once; starts, int64[t + 1]; and order,
            int64[rows]. Of token i there are rows order[starts[i]] to order[starts[i + 1] - 1], in
            the order of the list.
        most: the largest number of rows of a token.
    """

    tables: list[IndexTable]
    most: int


@dataclass(frozen=True, eq=False)
class TokenList:
    """Tokens of several peers, one peer's after another's, in rank order.

    Attributes:
        rows: which rows of the list are those of each peer: first and count.
        where: which tokens of a tensor the rows are.
        scattered: whether those of some peer are not one range.
        shared: the list in which peers with the same tokens share rows; None: it is this one.
    """

    rows: dict[int, tuple[int, int]]
    where: Where
    scattered: bool
    shared: TokenList | None = None

    @classmethod
    def of(cls, peers: Mapping[int, Where], shared: TokenList | None = None) -> TokenList:
        """The list of these peers' tokens. Those with the same tokens share rows, if it is not
        given the list in which they do."""
        rows, first = dict[int, tuple[int, int]](), 0
        known, every = dict[Where, tuple[int, int]](), []
        for peer, where in peers.items():
            if shared is not None or where not in known:
                known[where] = first, where.count
                first += where.count
                every.append(where.pieces)
            rows[peer] = known[where]
        starts, stops = (np.concatenate(each) for each in zip(*every, strict=True))
        heads, lasts = runs(starts[1:] != stops[:-1], len(starts))
        starts, stops = starts[heads], stops[lasts]
        several = (starts, stops) if len(starts) > 1 else None
        where = Where(0 if several else int(starts[0]), first, several)
        scattered = any(each.ranges is not None for each in peers.values())
        return cls(rows, where, scattered, shared)

    @cached_property
    def repeats(self) -> bool:
        """Whether it has a token more than once."""
        starts, stops = self.where.pieces
        order = starts.argsort(kind="stable")
        return bool((starts[order][1:] < np.maximum.accumulate(stops[order])[:-1]).any())

    @property
    def summed(self) -> bool:
        """Whether :attr:`sums` say how its rows are added up. (Those of ranges are added range by
        range, without a table of all their tokens.)"""
        return self.scattered and self.repeats

    @cached_property
    def sums(self) -> Sums:
        """The rows of each token, in the order of the list."""
        indices = self.where.indices
        assert indices is not None, "the tokens of one range do not repeat"
        order = indices.argsort(kind="stable")
        ordered = indices[order]
        heads, _ = runs(ordered[1:] != ordered[:-1], len(order))
        starts = np.append(heads, len(order))
        tables = [IndexTable(each) for each in (ordered[heads], starts, order)]
        return Sums(tables, int(np.diff(starts).max()))


class PeerTokens(dict[int, Where]):
    """Tokens by peer, in rank order; of each token, peer p has share p % ``team_size`` of the
    heads. ``forms``: what is known of messages with these tokens (:mod:`..comm.packing.forms`)."""

    def __init__(self, found: Mapping[int, Where], team_size: int = 1) -> None:
        super().__init__(found)
        self.team_size = team_size
        self._lists: dict[tuple[frozenset[int], bool], list[TokenList]] = {}
        self.forms: dict[Hashable, Any] = {}

    def lists(self, but: Iterable[int], *, shared: bool) -> list[TokenList]:
        """Lists of all peers ``but`` these, one for each share of the heads; ``shared``: in which
        peers with the same tokens share rows."""
        key = frozenset(but), shared
        if key not in self._lists:
            shares: dict[int, dict[int, Where]] = {}
            for peer, where in self.items():
                if peer not in key[0]:
                    shares.setdefault(peer % self.team_size, {})[peer] = where
            if shared:
                self._lists[key] = [TokenList.of(each) for each in shares.values()]
            else:
                both = zip(shares.values(), self.lists(key[0], shared=True), strict=True)
                self._lists[key] = [
                    known if len(set(each.values())) == len(each) else TokenList.of(each, known)
                    for each, known in both
                ]
        return self._lists[key]


def by_peer(ranges: Ints, team_size: int) -> PeerTokens:
    """Rows (peer, start, count) by peer, each peer's in their order. Peers with the same tokens
    share one :class:`Where`, so that these are put together once for all of them."""
    found = _of_few(ranges) if len(ranges) <= FEW else _of_many(ranges)
    return PeerTokens(found, team_size)


def _of_few(ranges: Ints) -> dict[int, Where]:
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for peer, start, count in ranges.tolist():
        first, last = starts.setdefault(peer, []), stops.setdefault(peer, [])
        if last and last[-1] == start:
            last[-1] += count
        else:
            first.append(start)
            last.append(start + count)
    alike: dict[tuple[int, ...], Where] = {}
    found = {}
    for peer in sorted(starts):
        first, last = starts[peer], stops[peer]
        if (key := (*first, *last)) not in alike:
            several = (np.array(first), np.array(last)) if len(first) > 1 else None
            alike[key] = Where(0 if several else first[0], sum(last) - sum(first), several)
        found[peer] = alike[key]
    return found


def _of_many(ranges: Ints) -> dict[int, Where]:
    peer, start, count = ranges[ranges[:, 0].argsort(kind="stable")].T
    stop = start + count
    heads, lasts = runs((peer[1:] != peer[:-1]) | (start[1:] != stop[:-1]), len(peer))
    peer, start, stop = peer[heads], start[heads], stop[lasts]
    heads, lasts = runs(peer[1:] != peer[:-1], len(peer))
    length = np.append(0, (stop - start).cumsum())
    counts = length[lasts + 1] - length[heads]
    of_each = (each.tolist() for each in (peer[heads], start[heads], counts, heads, lasts + 1))
    both = np.stack([start, stop])
    alike: dict[bytes, Where] = {}
    found = {}
    for p, first, n, a, b in zip(*of_each, strict=True):
        key = both[:, a:b].tobytes()
        if key not in alike:
            alike[key] = Where(first, n) if b - a == 1 else Where(0, n, (start[a:b], stop[a:b]))
        found[p] = alike[key]
    return found
