"""In which step keys of other ranks arrive, so that a rank holds few of them at once.

Ranks are grouped in units: the ranks of a host, or each team by itself where all links are alike.
Keys arrive at all ranks of a unit in the same step, so that a key that several of them need can
cross to the unit once.

Ranks that exchange messages come to a step together, so one that has more to attend in it holds up
all others. Therefore every step is the same part of all that moves: the ranges of keys that a unit
needs are cut into equal slices, one for each step.

    step                 1            2            3
    of range a           a third      a third      a third
    of range b           a third      a third      a third

With many steps slices would be short and messages many. Where all units receive as much from each
distance, as in a ring, keys therefore come by blocks of distances, and only those of a block are
cut. (Where units have keys of some others only, but all of as many, as on a grid, the distance to a
unit is the number of these before it.)

    step                 1            2            3            4
    distances 0 and 1    half         half
    distances 2 and 3                              half         half

A message costs the host time, and a long document is on many ranks. Where hosts would be busier
than kernels, and half as busy again as links, each of these ranks therefore sends in some steps
only, others in others, so that a range comes from about SENDERS pieces of the layout in each step:

    step                 1            2            3            4
    of one rank          all
    of the next                       all
    of the next                                    all
    of the next                                                 all

Short ranges are cut into fewer slices, or not at all. Those that a rank sends to a unit begin in
one of its steps after the other, and what it sends to different units in different steps.

Where a range is cut depends only on which ranks of the unit need it, and on how many pieces the
keys are in that the same ranks need. So a sender and a receiver find the same slices. Blocks of
distances have few senders in each step anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..arrays import Bools, Ints, columns
from ..layout import Layout
from ..mask.intervals import spread, touched
from .exchanges.held import held_in_steps, tokens_by_rank
from .exchanges.relays import relay_parts
from .exchanges.senders import begins_at, held_by_units, numbers_of, senders_of
from .moves import RECV, SEND, SEND_OFFSET, STEP, TOKEN0, TOKEN1, Moves, located

# From how many pieces of the layout a range comes in each step at least, where senders are few.
SENDERS = 32
# Slices have at least this part of the keys that a step may hold.
SHORT = 1 / 256
# Up to this many ranges of needed keys, what arrives in each step is counted. With more, this part
# of a step is left over, or twice as much with few senders, since steps are not quite equal.
MOST_COUNTED, LEFT_OVER = 50_000, 1 / 32
# The same for what is relayed, which takes ten times as long to count.
MOST_RELAYED = 5_000
# Of how many units what arrives is counted then: those with the busiest ranks.
BUSIEST = 4
# Blocks of distances may have this many times the steps of one block, and this many times the keys
# of the busiest rank, if the busiest of each block are added.
MORE_STEPS, MORE_KEYS = 4 / 3, 1.05


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Steps of all ranks.

    Attributes:
        unit_of: int64[P], the unit of each rank.
        slices: int64[B], for each block of distances, nearest first, the number of slices that its
            keys are cut into, one step for each. Of n units that a unit has keys from, itself
            included, those of block b come from b * n / B on, counted from the unit.
        short: the least keys of a slice; a range of fewer than twice as many is not cut.
        total: number of keys.
        pieces: int64[n, 2], rising: the first key of each range that the same ranks of a unit need,
            plus ``total`` times the unit, and in how many pieces of the layout it is, at most one
            for each rank; None: every rank sends in all steps of a block.
        senders: int64[U, n], of which units each unit has keys, itself first, then those after it,
            where all units have keys of as many others, but not of all; else None.
    """

    unit_of: Ints
    slices: Ints
    short: int
    total: int
    pieces: Ints | None = None
    senders: Ints | None = None

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.slices.sum())

    def cut(self, moves: Moves, team_size: int) -> Moves:
        """``moves``, for each unit and holder all or none, cut where a step ends."""
        unit = self.unit_of[moves[:, RECV] * team_size]
        line = unit * self.total
        start, stop = moves[:, TOKEN0] + line, moves[:, TOKEN1] + line
        edges = np.unique(np.concatenate([start, stop]))
        # Every range between two edges is needed by the same ranks of the unit.
        x, edge = spread(edges.searchsorted(start), edges.searchsorted(stop))
        length, first = np.diff(edges)[edge], edges[edge] - line[x]
        block = self._block_of(self.unit_of[moves[x, SEND]], unit[x])
        steps = np.maximum(self.slices, 1)[block]  # a rank's own keys may be alone in a block
        some, begins = steps, begins_at(moves[x, SEND], unit[x], self.unit_of, steps)
        pair = moves[x, SEND] + unit[x] * len(self.unit_of)
        number = numbers_of(pair, edge, len(edges))
        if self.pieces is not None and len(self.slices) == 1:
            some = self._steps_of_pieces(edges[edge])
        count = np.minimum(some, np.maximum(length // self.short, 1))
        y, n = spread(np.zeros_like(count), count)
        begin, end = length[y] * n // count[y], length[y] * (n + 1) // count[y]
        first, block, some, parts = first[y], block[y], some[y], moves[x[y]]
        parts[:, SEND_OFFSET] += first + begin - parts[:, TOKEN0]
        parts[:, TOKEN0], parts[:, TOKEN1] = first + begin, first + end
        # Short ranges are not cut into as many slices.
        turn = (number[y] + n * some // count[y]) % some
        turn = (begins[y] + turn) % steps[y]
        parts[:, STEP] = (self.slices.cumsum() - self.slices)[block] + turn
        return parts

    def _steps_of_pieces(self, first: Ints) -> Ints:
        """In how many steps a piece is sent, int64[n], of the ranges that have the keys ``first``,
        given as in :attr:`pieces`."""
        assert self.pieces is not None
        pieces = self.pieces[self.pieces[:, 0].searchsorted(first, side="right") - 1, 1]
        return np.clip(-(-self.steps * SENDERS // pieces), 1, self.steps)

    def _block_of(self, sender: Ints, receiver: Ints) -> Ints:
        units = int(self.unit_of[-1]) + 1
        if self.senders is None:
            return (sender - receiver) % units * len(self.slices) // units
        return self._place[receiver, sender] * len(self.slices) // self.senders.shape[1]

    @cached_property
    def _place(self) -> Ints:
        """int64[U, U]: the place of each unit among :attr:`senders` of another."""
        assert self.senders is not None
        units, count = self.senders.shape
        place = np.zeros((units, units), dtype=np.int64)
        np.put_along_axis(place, self.senders, np.arange(count)[None], axis=1)
        return place


class Bound(NamedTuple):
    """What memory and hosts allow, in keys of one group of heads.

    Attributes:
        received: how many keys a rank may receive in one step.
        held: how many keys of others it may hold at once; 0: any number.
        head_groups: groups of heads, each of which has all steps.
        relays: whether keys are relayed.
        few_senders: whether each of many ranks sends in some steps only.
    """

    received: int
    held: int
    head_groups: int
    relays: bool
    few_senders: bool


def arrivals(
    needed: Ints,
    layout: Layout,
    team_size: int,
    unit_of: Ints,
    received: Ints,
    bound: Bound,
    least_steps: int,
) -> Arrivals:
    """Steps within a bound; where there are too many ranges to count, on the average of all steps.

    Args:
        needed: int64[n, 3]: team, start, stop of the keys that it attends; disjoint within a team,
            by team.
        layout: of the keys. team_size: ranks of a team.
        unit_of: int64[P], rising; the ranks of a team are in one unit.
        received: int64[P], how many keys each rank receives.
        least_steps: number of steps if fewer are enough.
    """
    first, last = touched(needed[:, 1], needed[:, 2], layout.pieces[:, 1:3])
    ranges = int((last - first).sum())
    counted = ranges <= MOST_COUNTED
    a_step = min(bound.received, max(-(-int(received.max()) // least_steps), 1))
    filled = 1 - LEFT_OVER * (2 if bound.few_senders else 1)
    room = a_step if counted else max(int(a_step * filled), 1)
    if bound.relays and ranges > MOST_RELAYED:
        room = min(room, max(int(bound.received * filled), 1))
    slices, senders = _slices(needed, layout, team_size, unit_of, received, (a_step, room))
    short = max(int(SHORT * a_step), 1)
    pieces = _pieces(needed, layout, team_size, unit_of) if bound.few_senders else None
    found = Arrivals(unit_of, slices, short, layout.total, pieces, senders)
    if not counted:
        of_units = np.maximum.reduceat(received, np.unique(unit_of, return_index=True)[1])
        busiest = np.argsort(of_units)[-BUSIEST:]
        needed = needed[np.isin(unit_of[needed[:, 0] * team_size], busiest)]
    return _within(bound, found, needed, layout, team_size)


def _pieces(needed: Ints, layout: Layout, team_size: int, unit_of: Ints) -> Ints:
    """:attr:`Arrivals.pieces`."""
    total, line = layout.total, unit_of[needed[:, 0] * team_size] * layout.total
    edges = np.unique(np.concatenate([needed[:, 1] + line, needed[:, 2] + line]))
    offset = edges[:-1] // total * total
    start, stop = edges[:-1] - offset, np.minimum(edges[1:] - offset, total)
    first, last = touched(start, stop, layout.pieces[:, 1:3])
    return columns(edges[:-1], np.minimum(last - first, layout.group_size))


def _slices(
    needed: Ints,
    layout: Layout,
    team_size: int,
    unit_of: Ints,
    received: Ints,
    fits: tuple[int, int],
) -> tuple[Ints, Ints | None]:
    """:attr:`Arrivals.slices`, if they are equal, and :attr:`Arrivals.senders`; ``fits``: see
    :func:`_steps_of`."""
    busiest = received.max(keepdims=True, initial=1)
    in_one = _steps_of(busiest, *fits)
    if in_one[0] == 1:
        return in_one, None
    teams, team_unit = layout.group_size // team_size, unit_of[::team_size]
    of_team = held_by_units(needed, teams, layout, unit_of)
    held = of_team.sum(axis=1) - received.reshape(teams, -1).max(axis=1)
    of_team[np.arange(teams), team_unit] -= held
    senders = senders_of(of_team, team_unit)
    count = senders.shape[1]
    by_place, blocks = np.take_along_axis(of_team, senders[team_unit], axis=1), count
    while blocks > 1:
        firsts = -(-np.arange(blocks) * count // blocks)
        of_block = np.add.reduceat(by_place, firsts, axis=1).max(axis=0)
        slices = _steps_of(of_block, *fits)
        few = slices.sum() <= MORE_STEPS * in_one
        if few and of_block.sum() <= MORE_KEYS * busiest:
            return slices, senders if count < len(senders) else None
        blocks //= 2
    return in_one, None


def _steps_of(keys: Ints, most: int, room: int) -> Ints:
    """How many steps so many keys take, int64[n]: up to ``most`` are not cut, and of more each step
    has ``room``."""
    return np.where(keys > most, -(-keys // room), np.minimum(keys, 1))


def _within(
    bound: Bound, planned: Arrivals, needed: Ints, layout: Layout, team_size: int
) -> Arrivals:
    """``planned``, with more slices where some rank would hold more than the bound; at most twice
    as many steps, which only ranges of a few keys take."""
    if planned.steps <= 1:
        return planned
    moves, teams, steps = located(needed, layout.pieces), layout.group_size // team_size, planned
    while steps.steps <= 2 * planned.steps:
        full = _too_full(bound, steps, moves, teams, team_size)
        if not full.any():
            break
        # Many slices are too few by more than one, and each turn cuts all ranges.
        steps = replace(steps, slices=steps.slices + full * (1 + steps.slices // 16))
    return steps


def _too_full(bound: Bound, steps: Arrivals, moves: Moves, teams: int, team_size: int) -> Bools:
    """bool[B]: the blocks in whose steps some rank receives or holds more than the bound."""
    parts = steps.cut(moves, team_size)
    if team_size == 1:
        parts = parts[parts[:, RECV] != parts[:, SEND]]
    received = tokens_by_rank(parts, teams, steps.steps, own=team_size > 1)
    above = received.max(axis=0) > bound.received
    if bound.held and not (bound.relays and len(moves) > MOST_RELAYED):
        passed = relay_parts(parts, steps.unit_of, steps.steps)[1] if bound.relays else parts[:0]
        relayed = tokens_by_rank(passed, teams, steps.steps)
        above |= held_in_steps(received, relayed, bound.head_groups) > bound.held
    full = np.zeros(len(steps.slices), dtype=bool)
    (some,) = steps.slices.nonzero()
    full[some] = np.logical_or.reduceat(above, (steps.slices.cumsum() - steps.slices)[some])
    return full
