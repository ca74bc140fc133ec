"""In which step keys of other ranks arrive, so that a rank holds few of them at once.

Ranks are grouped in units: the ranks of a host, or each team by itself where all links are alike.
Keys arrive at all ranks of a unit in the same step, so that a key that several of them need can
cross to the unit once. The unit's own keys come first, then those of the other units by distance,
as in a ring, in steps of as many keys as any one of the unit's ranks has room for:

    step       1              2        3        4           5
    keys of    the unit       next,    next,    the two after that
               itself         a half   a half

All units receive what is at the same distance from them in the same steps, where that takes no more
steps: a rank that sends waits for its own kernels, so one with longer steps would hold up all
others.

Where a distance has more keys than a step may hold, what the unit needs of each shard is cut into
equal slices, so that all its holders send in every step. Where the slices of a holder end depends
only on what it is asked for, so a sender and a receiver find the same ones, each from what it
knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Ints, columns
from ..layout import Layout
from ..mask.intervals import runs, spread, touched, union
from .moves import RECV, SEND, SEND_OFFSET, STEP, TOKEN0, TOKEN1, Moves, counts, located

# Up to this many ranges of needed keys, the least number of slices is found by counting.
MOST_COUNTED = 50_000


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Steps of all ranks.

    Attributes:
        unit_of: int64[P], the unit of each rank.
        first: int64[U, U]: the first step of the keys that a unit (row) receives from another
            (column).
        slices: int64[U, U]: number of slices that these keys are cut into, one step for each.
        steps: number of steps, counted from 1, of the unit that has most.
    """

    unit_of: Ints
    first: Ints
    slices: Ints
    steps: int

    def cut(self, moves: Moves, team_size: int) -> Moves:
        """``moves``, for each unit and holder all or none, cut where a step ends."""
        receiver = self.unit_of[moves[:, RECV] * team_size]
        pair = receiver, self.unit_of[moves[:, SEND]]
        parts, x, n = _in_slices(moves, receiver, self.slices[pair])
        parts[:, STEP] = self.first[pair][x] + n - 1
        return parts


def arrivals(needed: Ints, layout: Layout, team_size: int, unit_of: Ints, most: int) -> Arrivals:
    """Steps in which no rank receives more than about ``most`` keys.

    Args:
        needed: int64[n, 3]: team, start, stop of the keys that it attends; disjoint within a team,
            by team.
        unit_of: int64[P], rising; the ranks of a team are in one unit.
    """
    units = int(unit_of[-1]) + 1
    wanted = _wanted(needed, layout, team_size, unit_of)
    of_unit = union(unit_of[needed[:, 0] * team_size], needed[:, 1], needed[:, 2])
    of_all = _held_by_units(of_unit, units, layout, unit_of)
    # A slice of what is needed of a shard may be a token longer than a share of it.
    room = np.maximum(most - np.bincount(unit_of), 1)
    slices = np.where(wanted > most, -(-of_all // room), 1)
    least = np.maximum(-(-wanted // most), 1)
    _cut_less(slices, least, needed, layout, team_size, unit_of, most)
    alone = _in_steps(unit_of, wanted, slices, most)
    together = _in_steps(unit_of, _most_as_far(wanted), _most_as_far(slices), most)
    return together if together.steps <= alone.steps else alone


def _in_steps(unit_of: Ints, wanted: Ints, slices: Ints, most: int) -> Arrivals:
    """Steps of slices by distance. Several distances share a step if no rank then receives more
    than ``most`` of ``wanted``, int64[U, U]."""
    numbers = np.arange(len(slices))
    first, step, filled = np.ones_like(slices), np.ones_like(numbers), np.zeros_like(numbers)
    for distance in range(len(slices)):
        pair = numbers, (numbers + distance) % len(slices)
        begins = (filled > 0) & (filled + wanted[pair] > most)
        first[pair] = step + begins
        step = first[pair] + slices[pair] - 1
        filled = np.where(slices[pair] > 1, most, wanted[pair] + filled * ~begins)
    return Arrivals(unit_of, first, slices, int(step.max()))


def _most_as_far(table: Ints) -> Ints:
    """``table``, by receiving and holding unit, with each entry the most at its distance."""
    units = np.arange(len(table))
    most = table[units[:, None], (units[:, None] + units) % len(table)].max(axis=0)
    return most[(units - units[:, None]) % len(table)]


def _wanted(needed: Ints, layout: Layout, team_size: int, unit_of: Ints) -> Ints:
    """int64[U, U]: the most keys of each unit (column) that any one rank of a unit (row)
    receives."""
    units, teams = int(unit_of[-1]) + 1, layout.group_size // team_size
    of_team, team_unit = _held_by_units(needed, teams, layout, unit_of), unit_of[::team_size]
    if team_size == 1:  # a rank does not receive what it holds itself
        received = counts(needed, layout, team_size)[:, 1]
        of_team[np.arange(teams), team_unit] -= of_team.sum(axis=1) - received
    most = np.zeros((units, units), dtype=np.int64)
    np.maximum.at(most, team_unit, of_team)
    return most


def _held_by_units(needed: Ints, count: int, layout: Layout, unit_of: Ints) -> Ints:
    """int64[count, U]: how much each unit holds of what each of ``count`` teams or units needs;
    ``needed`` is int64[n, 3], sorted by these."""
    units, pieces = int(unit_of[-1]) + 1, layout.pieces
    holder = unit_of[pieces[:, 0]]
    heads, lasts = runs(holder[1:] != holder[:-1], len(holder))  # stretches of one unit
    holder, start, stop = holder[heads], pieces[heads, 1], pieces[lasts, 2]
    stretches = columns(holder, start, stop, start)
    first, last = touched(needed[:, 1], needed[:, 2], stretches[:, 1:3])
    if (last - first).sum() <= len(stretches) * units:  # fewer than the table below has cells
        moves = located(needed, stretches)
        pair, tokens = moves[:, RECV] * units + moves[:, SEND], moves[:, TOKEN1] - moves[:, TOKEN0]
        held = np.bincount(pair, tokens, minlength=count * units)
        return held.astype(np.int64).reshape(count, units)
    before = np.zeros((len(holder) + 1, units), dtype=np.int64)  # of each unit, up to each stretch
    before[np.arange(len(holder)) + 1, holder] = stop - start
    np.cumsum(before, axis=0, out=before)

    def up_to(token: Ints) -> Ints:
        """int64[n, U]: keys of each unit before each token."""
        at = np.minimum(stop.searchsorted(token, side="right"), len(holder) - 1)
        found = before[at]
        found[np.arange(len(token)), holder[at]] += token - start[at]
        return found

    who = needed[:, 0]
    heads, _ = runs(who[1:] != who[:-1], len(who))
    held = np.zeros((count, units), dtype=np.int64)
    held[who[heads]] = np.add.reduceat(up_to(needed[:, 2]) - up_to(needed[:, 1]), heads)
    return held


def _cut_less(
    slices: Ints,
    least: Ints,
    needed: Ints,
    layout: Layout,
    team_size: int,
    unit_of: Ints,
    most: int,
) -> None:
    """Lower ``slices``, int64[U, U], which are enough, to the first number from ``least`` on with
    which no rank receives more than ``most`` in a step. Done only where there are few ranges to
    count."""
    pieces, units = layout.pieces, len(slices)
    open_ = (slices > least).reshape(-1)
    first, last = touched(needed[:, 1], needed[:, 2], pieces[:, 1:3])
    if not open_.any() or (last - first).sum() > MOST_COUNTED:
        return
    moves = located(needed, pieces)
    receiver = unit_of[moves[:, RECV] * team_size]
    pair = receiver * units + unit_of[moves[:, SEND]]
    flat, tried = slices.reshape(-1), least.reshape(-1).copy()
    while open_.any():
        some = open_[pair]
        moves, pair, receiver = moves[some], pair[some], receiver[some]
        parts, x, n = _in_slices(moves, receiver, tried[pair])
        mine = (team_size == 1) & (parts[:, RECV] == parts[:, SEND])
        parts, x, n = parts[~mine], x[~mine], n[~mine]
        key = (parts[:, RECV] * units + unit_of[parts[:, SEND]]) * (int(tried.max()) + 1) + n
        at, which = np.unique(key, return_inverse=True)
        tokens = np.bincount(which, parts[:, TOKEN1] - parts[:, TOKEN0], minlength=len(at))
        full = np.zeros(len(flat), dtype=bool)
        full[pair[x][(tokens > most)[which]]] = True
        fits = open_ & ~full
        flat[fits] = tried[fits]
        tried += 1
        open_ = full & (tried < flat)


def _in_slices(moves: Moves, receiver: Ints, slices: Ints) -> tuple[Moves, Ints, Ints]:
    """``moves`` cut where slices end: the parts, and for each part the number of its move and of
    its slice. What a unit needs of a rank is cut into as many slices as ``slices``, int64[n], says.

    Args:
        receiver: int64[n], the unit that receives each.
    """
    holder, start = moves[:, SEND], moves[:, SEND_OFFSET]
    stop = start + moves[:, TOKEN1] - moves[:, TOKEN0]
    pair = receiver * (int(holder.max(initial=0)) + 1) + holder
    of_pair, begin, end = union(pair, start, stop).T
    length = end - begin
    before = np.cumsum(length) - length
    heads = of_pair.searchsorted(pair)
    # Where a move starts among all that the unit needs of the holder, and how much that is.
    line = int(end.max(initial=0)) + 1
    at = (of_pair * line + begin).searchsorted(pair * line + start, side="right") - 1
    first = before[at] - before[heads] + start - begin[at] if len(at) else start
    total = np.bincount(of_pair, length)[pair].astype(np.int64) if len(at) else start
    last = first + stop - start
    x, n = spread(first * slices // total, ((last - 1) * slices) // total + 1)
    cut0 = np.maximum(first[x], -(-n * total[x] // slices[x]))
    cut1 = np.minimum(last[x], -(-(n + 1) * total[x] // slices[x]))
    some = cut0 < cut1
    x, n, cut0, cut1 = x[some], n[some], cut0[some], cut1[some]
    parts = moves[x]
    parts[:, TOKEN0] += cut0 - first[x]
    parts[:, TOKEN1] = parts[:, TOKEN0] + cut1 - cut0
    parts[:, SEND_OFFSET] += cut0 - first[x]
    return parts, x, n
