"""Which states travel between ranks: chains of segments, and the rounds of a prefix scan over them.

A segment of tokens maps its document's state S to A S + b. What enters segment p of a chain is the
composition of the p maps before it, and ranks exchange these maps, never tokens. In the first round
each segment gets the maps of the ``radix`` segments before it, and composes them. In each further
round it gets such compositions and composes those, which reaches ``radix`` times as far:

    radix 2, what enters segment p        after round 0      after round 1      after round 2
    of 8, as the maps that it covers      p-2 .. p-1         p-4 .. p-1         p-8 .. p-1
    radix 7: all in one round, an all-gather of the maps before

A composition that begins where the document does is a state: its A is not needed, and not sent.
Where chains are short, as over two ranks, segments go *in turn* instead: each waits for the state
of the segment before it and needs no map, so no segment is run twice.
The gradients of states travel along the same chains from the end, by the transposed maps.

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
from ..ring_attention.core.plan.cost_model import CostModel
from ..ring_attention.core.plan.exchanges.between_layouts import wanted_exchange
from ..ring_attention.core.plan.exchanges.exchange import Exchange

RADIXES = (2, 3, 4, 8)  # the radices to try, besides everything in one round
MOST_AT_ONCE = 64  # segments that one may wait for in one round: its table holds all their pairs
MOST_TURNS = 4  # rounds of segments in turn: each is a kernel call on some rank


class MapBytes(NamedTuple):
    """Bytes of the two parts of a segment's map, A and b, for all heads and batch entries."""

    a: int
    b: int


class Compose(NamedTuple):
    """The maps that one segment composes in a round, the farthest first.

    Attributes:
        target: index of the segment among the rank's chained segments.
        b: rows among the states that the rank received. a: rows among the matrices that it
            received: as many, or one fewer where the farthest composition begins its document.
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
        target, source: int64[n]: chained segments, sorted by target, the farthest source first.
        with_a: bool[n]: whether the source's A is needed.
    """

    target: Ints
    source: Ints
    with_a: Bools


class Chains(NamedTuple):
    """The chained segments, in the order of the sequence, and how a pass goes through them.

    Attributes:
        rank, tokens: int64[k]: each segment's rank and number of tokens.
        position, length: int64[k]: its position in its chain, in the direction of the pass, and
            the number of segments of the chain.
        step: what takes a segment's index to that of the one before it in its chain.
    """

    rank: Ints
    tokens: Ints
    position: Ints
    length: Ints
    step: int

    def tokens_by_maps(self, of_map: MapBytes) -> float:
        """How many tokens' states are computed one after the other: first the maps and the segments
        that begin a chain, then all segments that do not. A dense A takes as long as a state with
        as many columns."""
        between = (self.position > 0) & (self.position < self.length - 1)
        first = np.where(self.position == 0, 1.0, between * (1 + of_map.a / of_map.b))
        times = (first, (self.position > 0) * 1.0)
        return float(sum(np.bincount(self.rank, self.tokens * each).max() for each in times))

    def tokens_in_turn(self) -> float:
        """The same, if each segment waits for the one before it."""
        free, done = np.zeros(self.rank.max() + 1), np.zeros(len(self.rank))
        for turn in range(int(self.position.max()) + 1):
            now = np.flatnonzero(self.position == turn)
            if turn:
                np.maximum.at(free, self.rank[now], done[now + self.step])
            free += np.bincount(self.rank[now], self.tokens[now], minlength=len(free))
            done[now] = free[self.rank[now]]
        return float(free.max())


@dataclass(frozen=True, eq=False)
class Scan:
    """The rounds that bring each chained segment the state that enters it.

    Attributes:
        rounds: in the order in which they run.
        in_turn: whether a segment sends its state once it has run, in the round of its position,
            instead of its map.
        tokens: how many tokens' states are computed one after the other, on whichever ranks.
    """

    chains: Chains
    ranks: int
    rounds: tuple[Round, ...]
    in_turn: bool
    tokens: float

    @property
    def rank(self) -> Ints:
        """int64[k]: the rank of each chained segment, in the order of the sequence."""
        return self.chains.rank

    @cached_property
    def known(self) -> Ints:
        """int64[k]: how many rounds bring each segment the state that enters it."""
        position = self.chains.position
        return position if self.in_turn else np.where(position, len(self.rounds), 0)

    @cached_property
    def held(self) -> Layout:
        """Which rank holds which map, as a layout."""
        order = np.argsort(self.rank, kind="stable")
        return Layout(columns(self.rank[order], order, order + 1), self.ranks)

    def of_rank(self, rank: int) -> tuple[RankRound, ...]:
        """One rank's part of each round."""
        return _of_rank(self, rank)

    def wanted(self) -> Iterator[tuple[Ints, Ints]]:
        """For each round the states, and the matrices, that ranks fetch, each as int64[n, 2] of
        rank and source without duplicates."""
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


@lru_cache(maxsize=256)
def scan_of(
    segments: Segments, of_map: MapBytes, costs: CostModel, backward: bool = False
) -> Scan | None:
    """The scan that should take the least time over a layout's segments: in turn, if MOST_TURNS
    rounds suffice and no more tokens wait for one another's states than with maps; else a scan of
    maps. None if no document spans several segments. The same on every rank."""
    if not len(segments.chained):
        return None
    both = [_chains(segments, back) for back in (False, True)]
    chains, ranks = both[backward], segments.layout.group_size
    by_maps = [each.tokens_by_maps(of_map) for each in both]
    reach = int(chains.position.max())
    if reach <= MOST_TURNS:
        in_turn = [each.tokens_in_turn() for each in both]
        if sum(in_turn) <= sum(by_maps):  # same for both passes: a forward in turn saves no maps
            return Scan(chains, ranks, tuple(_turns(chains)), True, in_turn[backward])

    def made(radix: int) -> Scan:
        return Scan(chains, ranks, tuple(_rounds(chains, radix)), False, by_maps[backward])

    def seconds(scan: Scan) -> float:
        busiest = scan.received_bytes(of_map).max(axis=1)
        return float(busiest.sum()) / costs.link_bytes + len(scan.rounds) * costs.step_seconds

    at_once = [max(reach, 1)] if reach <= MOST_AT_ONCE else []
    return min(map(made, [*at_once, *(r for r in RADIXES if r < reach)]), key=seconds)


def _chains(segments: Segments, backward: bool) -> Chains:
    chained = segments.chained
    document, index = segments.document[chained], np.arange(len(chained))
    begin = np.searchsorted(document, document, side="left")
    end = np.searchsorted(document, document, side="right")
    position = end - 1 - index if backward else index - begin
    tokens = (segments.stop - segments.start)[chained]
    return Chains(segments.rank[chained], tokens, position, end - begin, 1 if backward else -1)


def _turns(chains: Chains) -> Iterator[Round]:
    """Each segment gets the state of the one before it, one position of all chains per round."""
    for turn in range(1, int(chains.position.max()) + 1):
        target = np.flatnonzero(chains.position == turn)
        yield Round(target, target + chains.step, np.zeros(len(target), bool))


def _rounds(chains: Chains, radix: int) -> Iterator[Round]:
    position, reach, covered = chains.position, int(chains.position.max()), 0
    while covered < reach:
        farthest_first = np.arange(radix if covered == 0 else radix - 1, 0, -1)
        hops = farthest_first * max(covered, 1)
        target = np.repeat(np.arange(len(position)), len(hops))
        hop = np.tile(hops, len(position))
        # A segment's own map, sent first, covers itself; a composition covers those before it.
        there = position[target] - hop >= (0 if covered == 0 else 1)
        target, source = target[there], (target + chains.step * hop)[there]
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
    """The input of :func:`wanted_exchange`: each rank's rows one after the other."""
    rank, source = wanted.T
    return columns(rank, source, source + 1, np.arange(len(rank)) - np.searchsorted(rank, rank))
