"""Evens out the work of packed documents by construction.

A document is one slice, and no other slice has any of its tokens. So a team that has too much work
gives away rows of one document after the other. What it gives are stretches of a line:

    area of a team    | the document of most keys, last row first     | the next | ...
                      |  to team 5  |  to team 6  | to team 9  |  stays

All that is given, team by team, is one line too, and so is all that is lacking. A stretch ends
where either line passes from one team to the next; its rows follow from its area. So there is
nothing to search, and there are at most as many stretches as teams that give plus teams that take.
(As in the northwest corner rule for transportation problems, Dantzig, 1951, which keeps the order
of teams: those that take neighbouring rows are neighbours, and share most of their keys.)
"""

from __future__ import annotations

import numpy as np

from ...arrays import Floats, Ints
from ...layout import Layout
from ...mask.slices import HI, K0, Q0, Q1, Slices, areas, tighten
from .work import TEAM, TILE_ROWS, Work, with_team

# How far a team may be above or below the level, as a fraction of it, without giving or taking.
SLACK = 0.005
# How many times a cut may be moved to correct its area. Causal documents, where each row has one
# key more than the one before, need none; windows are not as simple.
CORRECTIONS = 2


def evened_documents(
    work: Work, documents: Slices, layout: Layout, team_size: int, least: float
) -> Work:
    """``work`` with rows given by teams that have too much to those that have too little.

    Args:
        work: every row computed by its holder; returned where it is even.
        documents: the slices of the mask, none with a token of another.
        least: an area that is not worth dividing, because kernels take no less time for less.
    """
    teams = layout.group_size // team_size
    area, team = areas(work[:, :TEAM]), work[:, TEAM]
    load = np.bincount(team, area, minlength=teams)
    level = max(float(load.mean()), least)
    excess = (load - level).astype(np.float64)
    slack = SLACK * level
    givers, takers = (excess > slack).nonzero()[0], (excess < -slack).nonzero()[0]
    if len(givers) == 0 or len(takers) == 0:
        return work
    gives = excess[team] > slack
    line, area = work[gives], area[gives]
    order = np.lexsort((-_keys_of_rows(line, line[:, Q1] - 1), line[:, TEAM]))
    line, area = line[order], area[order]
    if level > load.mean():
        first = line[line[:, TEAM].searchsorted(givers)]
        takers = _fewest(takers, excess, float(excess[givers].sum()), first, work, documents)
    given_line = _cut(line, area, *_stretches(givers, takers, excess), slack)
    return np.concatenate([work[~gives], given_line])


def _fewest(
    takers: Ints, excess: Floats, given: float, first: Work, work: Work, documents: Slices
) -> Ints:
    """The fewest takers that lack as much as is given, those that lack most first. Takers that hold
    a part of documents of which ``first`` is given come last, as they need one more kernel call."""
    starts = documents[:, Q0]
    of_first, of_work = (starts.searchsorted(some[:, Q0], side="right") for some in (first, work))
    holds = np.bincount(work[:, TEAM], np.isin(of_work, of_first), minlength=len(excess)) > 0
    order = takers[np.lexsort((excess[takers], holds[takers]))]
    enough = int(np.cumsum(-excess[order]).searchsorted(given)) + 1
    return np.sort(order[:enough])


def _stretches(givers: Ints, takers: Ints, excess: Floats) -> tuple[Ints, Floats, Ints]:
    """The stretches of each giver's line, what is given and after that what stays: the giver,
    int64[n], rising; the area of its line before the stretch, float64[n]; and the team that
    computes it, int64[n]."""
    surplus, lacking = np.cumsum(excess[givers]), np.cumsum(-excess[takers])
    lacking *= surplus[-1] / lacking[-1]
    start = np.sort(np.concatenate([[0.0], surplus[:-1], lacking[:-1]]))
    giver, taker = (ends[:-1].searchsorted(start, side="right") for ends in (surplus, lacking))
    before = surplus - excess[givers]
    number = np.concatenate([giver, np.arange(len(givers))])
    area = np.concatenate([start - before[giver], excess[givers]])
    team = np.concatenate([takers[taker], givers])
    order = np.lexsort((area, number))
    return givers[number[order]], area[order], team[order]


def _cut(
    line: Work, area: Ints, giver: Ints, area_before: Floats, team: Ints, slack: float
) -> Work:
    """The lines of all givers, int64[n, 7] with areas int64[n], cut where :func:`_stretches`
    says."""
    first, last = (line[:, TEAM].searchsorted(giver, side) for side in ("left", "right"))
    ends = np.cumsum(area)
    before = ends - area
    place = before[first] + area_before
    at = np.minimum(ends.searchsorted(place, side="right"), last - 1)
    rows = _rows_of_area(line[at, :TEAM], place - before[at], slack)
    # Where stretches and slices start on one number line, rows of a slice counted from its last.
    length = line[:, Q1] - line[:, Q0]
    stride = int(length.max()) + 1
    starts, stretch_starts = np.arange(len(line)) * stride, at * stride + rows
    cuts = np.sort(np.concatenate([starts, stretch_starts]))
    x = cuts // stride
    stop = np.minimum(np.append(cuts[1:], len(line) * stride) - starts[x], length[x])
    start = cuts - starts[x]
    some = start < stop
    x, start, stop, cuts = x[some], start[some], stop[some], cuts[some]
    parts = line[x, :TEAM]
    parts[:, Q0], parts[:, Q1] = line[x, Q1] - stop, line[x, Q1] - start
    stretch = stretch_starts.searchsorted(cuts, side="right") - 1
    return with_team(tighten(parts), team[stretch])


def _rows_of_area(slices: Slices, area: Floats, slack: float) -> Ints:
    """int64[n]: how many of the last rows of each slice have about this area.

    The keys of a row, from the last to the first, are taken to fall or rise evenly.
    """
    q0, q1 = slices[:, Q0], slices[:, Q1]
    length, last = q1 - q0, _keys_of_rows(slices, q1 - 1)
    fall = (last - _keys_of_rows(slices, q0)) / np.maximum(length - 1, 1)
    # x rows have x * last - fall * x^2 / 2 pairs; this form of the root also holds for no fall.
    rows = 2 * area / (last + np.sqrt(np.maximum(last**2 - 2 * area * fall, 0.0)))
    rows = np.minimum(np.rint(rows).astype(np.int64), length)
    for _ in range(CORRECTIONS):
        tail = slices.copy()
        tail[:, Q0] = q1 - rows
        wrong = area - areas(tighten(tail)) * (rows > 0)
        if np.abs(wrong).max() <= slack:
            break
        keys = _keys_of_rows(slices, np.maximum(q1 - rows, q0))
        more = np.rint(wrong / np.maximum(keys, 1)).astype(np.int64)
        rows = np.minimum(np.maximum(rows + more, 0), length)
    in_tiles = np.minimum((rows + TILE_ROWS // 2) // TILE_ROWS * TILE_ROWS, length)
    return np.where(last * TILE_ROWS <= slack, in_tiles, rows)


def _keys_of_rows(slices: Slices, row: Ints) -> Ints:
    """int64[n]: keys that a row of each slice, or of work, attends."""
    k0, k1, lo, hi = slices[:, K0 : HI + 1].T
    return np.minimum(k1 - 1, row + hi) - np.maximum(k0, row + lo) + 1
