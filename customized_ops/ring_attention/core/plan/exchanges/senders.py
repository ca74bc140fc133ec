"""From which units, such as hosts, each team has keys, how many, and when ranks send them."""

from __future__ import annotations

import numpy as np

from ...arrays import Ints, columns
from ...layout import Layout
from ...mask.intervals import runs, touched
from ..moves import RECV, SEND, TOKEN0, TOKEN1, located, tokens_of_kinds
from .relays import number_in_unit

GOLDEN, FEW_STEPS = 2654435769, 8  # the golden ratio, of 2 ** 32


def senders_of(of_team: Ints, team_unit: Ints) -> Ints:
    """int64[U, n]: each unit, and after it the others that it has keys from; all others, where
    units do not all have keys from as many.

    Args:
        of_team: int64[teams, U], how many keys each team has from each unit.
        team_unit: int64[teams], rising, the unit of each team.
    """
    units = of_team.shape[1]
    after = (np.arange(units)[:, None] + np.arange(units)) % units
    firsts = np.unique(team_unit, return_index=True)[1]
    meets = np.take_along_axis(np.maximum.reduceat(of_team, firsts) > 0, after, axis=1)
    meets[:, 0] = True
    counts = meets.sum(axis=1)
    return after[meets].reshape(units, -1) if (counts == counts[0]).all() else after


def held_by_units(needed: Ints, count: int, layout: Layout, unit_of: Ints) -> Ints:
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
    who = needed[:, 0]
    heads, _ = runs(who[1:] != who[:-1], len(who))
    held = np.zeros((count, units), dtype=np.int64)
    tokens = tokens_of_kinds(needed[:, 1:], stretches[:, 1:3], holder, units)
    held[who[heads]] = np.add.reduceat(tokens, heads)
    return held


def begins_at(rank: Ints, unit: Ints, unit_of: Ints, steps: Ints) -> Ints:
    """In which of so many steps each rank begins to send to a unit, int64[n], so that the ranks of
    many units fill all steps evenly. In few steps, ranks of one number in their units, and units
    that receive, take turns; in many, steps of neighbours are multiples of the golden ratio apart.
    """
    in_turn = (unit_of + number_in_unit(unit_of))[rank] + unit
    apart = (rank * GOLDEN + unit * (GOLDEN // 3)) % (1 << 32) * steps >> 32
    return np.where(steps <= FEW_STEPS, in_turn % steps, apart)


def numbers_of(owner: Ints, edge: Ints, edges: int) -> Ints:
    """int64[n]: how many of so many edges each owner has before this one."""
    found, at = np.unique(owner * edges + edge, return_inverse=True)
    return at - (found // edges).searchsorted(owner)
