"""Which states travel between ranks: chains of segments, and the rounds of a prefix scan over them.

A segment of tokens takes its document's state S to A S + b. What enters segment p of a chain is the
composition of the p maps before it, and ranks exchange these maps, never tokens. In the first round
each segment gets the maps of ``radix`` segments before it, and composes them; in each further round
compositions of compositions, which reach ``radix`` times as far:

    radix 2, what enters segment p        after round 0      after round 1      after round 2
    of 8, as the maps that it covers      p-2 .. p-1         p-4 .. p-1         p-8 .. p-1
    radix 7: all in one round, an all-gather of those before

A composition that begins where the document does is a state: its A is not needed, and not sent.
The gradients of states travel the same chains from the end, by the transposed maps.

Blelloch: Prefix Sums and Their Applications, CMU-CS-90-190 (1990); Hillis and Steele: Data Parallel
Algorithms, CACM 29 (1986). Scans of such maps over devices: Martin and Cundy, arXiv:1709.04057.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ..along_sequence import Segments
from ..ring_attention.core.arrays import Bools, Ints, columns
from ..ring_attention.core.layout import Layout
from ..ring_attention.core.plan.cost import CostModel
from ..ring_attention.core.plan.exchanges.between_layouts import wanted_exchange
from ..ring_attention.core.plan.exchanges.exchange import Exchange

RADIXES = (2, 3, 4, 8)  # that are tried, beside all in one round
MOST_AT_ONCE = 64  # segments that one may wait for in one round: its table is of all their pairs


class MapBytes(NamedTuple):
    """Bytes of what a segment's map is made of: A and b, for all heads and entries of a batch."""

    a: int
    b: int


class Compose(NamedTuple):
    """What one segment composes in a round, the farthest first.

    Attributes:
        target: of the rank's chained segments.
        b: rows of what the rank received of states. a: rows of what it received of matrices, as
            many, or one less where the farthest composition begins its document.
    """

    target: int
    b: tuple[int, ...]
    a: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RankRound:
    """One rank's part of a round: what it fetches, as if maps were tokens, and what it composes."""

    b: Exchange
    a: Exchange
    compose: tuple[Compose, ...]


@dataclass(frozen=True, eq=False)
class Round:
    """What travels in a round.

    Attributes:
        target, source: int64[n]: chained segments; by target, its farthest source first.
        with_a: bool[n]: whether the source's A is needed.
    """

    target: Ints
    source: Ints
    with_a: Bools


@dataclass(frozen=True, eq=False)
class Scan:
    """The rounds that bring each chained segment what enters it.

    Attributes:
        rank: int64[k] of each chained segment, in the order of the sequence.
        rounds: one after the other.
    """

    rank: Ints
    ranks: int
    rounds: tuple[Round, ...]

    @cached_property
    def held(self) -> Layout:
        """Which rank holds which map, as a layout."""
        order = np.argsort(self.rank, kind="stable")
        return Layout(columns(self.rank[order], order, order + 1), self.ranks)

    def of_rank(self, rank: int) -> tuple[RankRound, ...]:
        """One rank's part of each round."""
        return _of_rank(self, rank)

    def wanted(self) -> Iterator[tuple[Ints, Ints]]:
        """Of each round, int64[n, 2] of rank and source: the states, and the matrices, that a rank
        fetches, each once."""
        for each in self.rounds:
            pairs = columns(self.rank[each.target], each.source)
            yield np.unique(pairs, axis=0), np.unique(pairs[each.with_a], axis=0)

    def received_bytes(self, of_map: MapBytes) -> Ints:
        """int64[rounds, P]: what each rank receives from others."""
        found = np.zeros((len(self.rounds), self.ranks), np.int64)
        for n, both in enumerate(self.wanted()):
            for wanted, size in zip(both, (of_map.b, of_map.a), strict=True):
                receiver = wanted[self.rank[wanted[:, 1]] != wanted[:, 0], 0]
                found[n] += np.bincount(receiver, minlength=self.ranks) * size
        return found


def scan_of(
    segments: Segments, of_map: MapBytes, costs: CostModel, backward: bool = False
) -> Scan | None:
    """The scan over a layout's segments that should take the least time; None if no document spans
    several. The same on every rank."""
    return _scan_of(segments, of_map, costs, backward) if len(segments.chained) else None


@lru_cache(maxsize=256)
def _scan_of(segments: Segments, of_map: MapBytes, costs: CostModel, backward: bool) -> Scan:
    document = segments.document[segments.chained]
    index = np.arange(len(document))
    begin = np.searchsorted(document, document, side="left")
    end = np.searchsorted(document, document, side="right")
    position = end - 1 - index if backward else index - begin
    reach = int(position.max())
    rank, ranks = segments.rank[segments.chained], segments.layout.group_size

    def made(radix: int) -> Scan:
        return Scan(rank, ranks, tuple(_rounds(position, reach, radix, 1 if backward else -1)))

    def seconds(scan: Scan) -> float:
        busiest = scan.received_bytes(of_map).max(axis=1)
        return float(busiest.sum()) / costs.link_bytes + len(scan.rounds) * costs.step_seconds

    at_once = [max(reach, 1)] if reach <= MOST_AT_ONCE else []
    return min(map(made, [*at_once, *(r for r in RADIXES if r < reach)]), key=seconds)


def _rounds(position: Ints, reach: int, radix: int, step: int) -> Iterator[Round]:
    """
    Args:
        position: int64[k] in its chain, in the direction in which it goes.
        reach: the largest. step: from a segment to its chain's previous one.
    """
    covered = 0
    while covered < reach:
        farthest_first = np.arange(radix if covered == 0 else radix - 1, 0, -1)
        hops = farthest_first * max(covered, 1)
        target = np.repeat(np.arange(len(position)), len(hops))
        hop = np.tile(hops, len(position))
        # A segment's own map, sent first, is of itself; a composition, of those before it.
        there = position[target] - hop >= (0 if covered == 0 else 1)
        target, source = target[there], (target + step * hop)[there]
        yield Round(target, source, position[source] > covered)
        covered = max(covered, 1) * radix


@lru_cache(maxsize=256)
def _of_rank(scan: Scan, rank: int) -> tuple[RankRound, ...]:
    own = np.flatnonzero(scan.rank == rank)
    found = []
    for each, both in zip(scan.rounds, scan.wanted(), strict=True):
        of_b, of_a = (wanted_exchange(_buffers(w), scan.held, rank) for w in both)
        rows = [
            {source: n for n, source in enumerate(w[w[:, 0] == rank, 1].tolist())} for w in both
        ]
        compose = []
        for n, target in enumerate(own.tolist()):
            mine = each.target == target
            sources, with_a = each.source[mine], each.with_a[mine]
            if len(sources):
                b = tuple(rows[0][s] for s in sources.tolist())
                a = tuple(rows[1][s] for s in sources[with_a].tolist())
                compose.append(Compose(n, b, a))
        found.append(RankRound(of_b, of_a, tuple(compose)))
    return tuple(found)


def _buffers(wanted: Ints) -> Ints:
    """What :func:`wanted_exchange` takes: each rank's rows one after the other."""
    rank, source = wanted.T
    return columns(rank, source, source + 1, np.arange(len(rank)) - np.searchsorted(rank, rank))
