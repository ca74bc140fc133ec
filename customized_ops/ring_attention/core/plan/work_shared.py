"""Work between a row's holder and its key's holder, shared by both."""

from __future__ import annotations

import numpy as np

from ..arrays import Floats
from ..layout import Layout
from ..mask.intervals import touched
from ..mask.slices import K0, K1, Q0, Q1, Slices, areas
from .work_parts import (
    TEAM,
    TILE_ROWS,
    TOLERANCE,
    Work,
    area_per_cell,
    area_per_team,
    cut_keys,
    cut_rows,
    with_team,
)

# Teams between which work is shared, pair by pair, parts that lie between them, and turns for each
# pair: more would take long, or make many small calls.
MOST_SHARING, MOST_SHARED, SWEEPS = 16, 2048, 200


def shared(work: Work, q_layout: Layout, k_layout: Layout, team_size: int) -> Work:
    """Even out work between those who hold its rows and those who hold its keys.

    Pairs whose rows and keys lie on different teams may be computed by either: of the rows that one
    team has for the keys of another, the first go to the keys, so many that the busiest team has
    as little as it can have that way. Contiguous shards of a causal mask come out even at halves,
    whatever the number of teams, and no team computes rows of one peer over keys of another.

    Args:
        work: every row computed by its holder.
    """
    teams = q_layout.group_size // team_size
    area = area_per_team(work, teams)
    if teams > MOST_SHARING or area.max(initial=0) <= (1 + TOLERANCE) * area.sum() / teams:
        return work
    pieces = k_layout.pieces
    first, last = touched(work[:, K0], work[:, K1], pieces[:, 1:3])
    home = (last == first + 1) & (pieces[first, 0] // team_size == work[:, TEAM])
    if (last - first)[~home].sum() > MOST_SHARED:
        return work
    away = work[~home]
    x, piece, parts = cut_keys(away[:, :TEAM], pieces[:, 1:3])
    here, there = away[x, TEAM], pieces[piece, 0] // team_size
    between = np.diag(area_per_team(work[home], teams))
    np.add.at(between, (here, there), areas(parts))
    after = [work[home], with_team(parts[here == there], here[here == there])]
    for (holder, other), fraction in _fractions_given(between).items():
        some = parts[(here == holder) & (there == other)]
        row = _row_after(some, fraction)
        tiles = np.array([[0, row], [row, q_layout.total]])
        _, _, cut = cut_rows(some, tiles[tiles[:, 0] < tiles[:, 1]])
        after.append(with_team(cut, np.where(cut[:, Q0] < row, other, holder)))
    even = np.concatenate(after)
    return even if area_per_team(even, teams).max() < area.max() else work


def _fractions_given(between: Floats) -> dict[tuple[int, int], float]:
    """Which part of the area between the rows of team a and the keys of team b goes to b, for each
    such pair that has some, so that the largest load is about as small as it can be; found by
    turns for each pair.

    Args:
        between: float64[n, n]: that area; of a team's rows and its own keys on the diagonal.
    """
    given = {(a, b): 0.5 for a, b in np.argwhere(between).tolist() if a != b}
    load = np.diag(between) + (between.sum(0) + between.sum(1) - 2 * np.diag(between)) / 2
    for sweep in range(SWEEPS):
        before = load.copy()
        for a, b in given if sweep % 2 else reversed(given):
            even = given[a, b] + (load[a] - load[b]) / (2 * between[a, b])
            more = (min(max(even, 0.0), 1.0) - given[a, b]) * between[a, b]
            given[a, b] += more / between[a, b]
            load[a] -= more
            load[b] += more
        if np.abs(load - before).max() <= TOLERANCE / 20 * load.mean():
            break
    return given


def _row_after(parts: Slices, fraction: float) -> int:
    """The row before which about so much of the parts' area lies; it suits kernels' tiles, unless
    that would be too coarse."""
    start, stop = int(parts[:, Q0].min()), int(parts[:, Q1].max())
    step = min(TILE_ROWS, max((stop - start) // 16, 1))
    rows = np.arange((start // step + 1) * step, stop, step)
    bounds = np.concatenate([[start], rows, [stop]])
    before = np.concatenate([[0], np.cumsum(area_per_cell(parts, bounds))])
    return int(bounds[np.abs(before - fraction * before[-1]).argmin()])
