"""Evens out uneven work: it is shared by the holders of rows and of keys, or given away."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right

import numpy as np

from ...arrays import Floats, Ints, columns
from ...layout import Layout
from ...mask.intervals import runs, spread, touched
from ...mask.slices import K0, K1, Q0, Q1, Slices, areas, cut_keys, cut_rows
from .work import TEAM, TILE_ROWS, Work, area_per_team, with_team

# Imbalance left as it is: moving rows takes messages, and these cost more than a few percent.
WORK_TOLERANCE = 0.02
# Limits on the teams between which work is shared, pair by pair, on the parts between them, and on
# the turns for each pair: more would take long, or make many small calls.
MOST_SHARING, MOST_SHARED, SWEEPS = 16, 2048, 200


def shared(work: Work, q_layout: Layout, k_layout: Layout, team_size: int) -> Work:
    """Even out work between those who hold its rows and those who hold its keys.

    Pairs whose rows and keys are on different teams may be computed by either. Of the rows that one
    team has for the keys of another, the first go to the keys: so many that the busiest team has as
    little as possible that way. Contiguous shards of a causal mask come out even when each pair is
    split in halves, whatever the number of teams, and no team computes rows of one peer over keys
    of another.

    Args:
        work: every row computed by its holder.
    """
    teams = q_layout.group_size // team_size
    area = area_per_team(work, teams)
    if teams > MOST_SHARING or area.max(initial=0) <= (1 + WORK_TOLERANCE) * area.sum() / teams:
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
    """The fraction of the area between the rows of team a and the keys of team b that goes to b,
    for each pair that has some, so that the largest load is about as small as possible. It is found
    by adjusting the pairs in turn.

    Args:
        between: float64[n, n]: that area; on the diagonal, of a team's rows and its own keys.
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
        if np.abs(load - before).max() <= WORK_TOLERANCE / 20 * load.mean():
            break
    return given


def _row_after(parts: Slices, fraction: float) -> int:
    """The row with about this fraction of the parts' area before it; it suits kernels' tiles,
    unless that would be too coarse."""
    start, stop = int(parts[:, Q0].min()), int(parts[:, Q1].max())
    step = min(TILE_ROWS, max((stop - start) // 16, 1))
    rows = np.arange((start // step + 1) * step, stop, step)
    bounds = np.concatenate([[start], rows, [stop]])
    before = np.concatenate([[0], np.cumsum(area_per_cell(parts, bounds))])
    return int(bounds[np.abs(before - fraction * before[-1]).argmin()])


def evened(work: Work, layout: Layout, team_size: int) -> Work:
    """Teams with more than the mean area give rows that they hold to teams with less.

    Surpluses and deficits are matched largest first, so there are fewer transfers than teams. Each
    is cut from one end of a piece: the end where the rows are denser, because then fewer rows move.
    """
    teams = layout.group_size // team_size
    area = area_per_team(work, teams)
    mean = area.sum() / teams
    if area.max(initial=0) <= (1 + WORK_TOLERANCE) * mean:
        return work
    pieces = layout.pieces
    piece = np.searchsorted(pieces[:, 1], work[:, Q0], side="right") - 1
    giveable = work[:, TEAM] == pieces[piece, 0] // team_size
    given = work[giveable, :TEAM]
    cells, cell_area = _cells(given, layout, WORK_TOLERANCE * mean)
    holder = pieces[np.searchsorted(pieces[:, 1], cells[:, 0], side="right") - 1, 0] // team_size
    computes = _assign(cells, holder, cell_area, area - mean, WORK_TOLERANCE / 2 * mean)
    # Neighbouring cells that stay together are one range again.
    apart = (computes[1:] != computes[:-1]) | (holder[1:] != holder[:-1])
    heads, lasts = runs(apart, len(cells))
    ranges = columns(cells[heads, 0], cells[lasts, 1])
    _, n, parts = cut_rows(given, ranges)
    after = np.concatenate([work[~giveable], with_team(parts, computes[heads][n])])
    return after if area_per_team(after, teams).max() < area.max() else work


def _cells(slices: Slices, layout: Layout, most: float) -> tuple[Ints, Floats]:
    """The sequence in cells, cut where work may be cut: at the layout's pieces, at multiples of 128
    to suit kernels' tiles, and finer where a cell would hold an area above ``most``; and the cells'
    areas."""
    pieces = layout.pieces
    grid = np.arange(0, layout.total, TILE_ROWS)
    bounds = np.unique(np.concatenate([grid, pieces[:, 1], [layout.total]]))
    area = area_per_cell(slices, bounds)
    parts = np.minimum(np.ceil(area / most), np.diff(bounds)).astype(np.int64).clip(1)
    if (parts > 1).any():
        x, n = spread(np.zeros_like(parts), parts)
        inner = bounds[x] + (bounds[x + 1] - bounds[x]) * n // parts[x]
        bounds = np.append(inner, layout.total)
        area = area_per_cell(slices, bounds)
    return columns(bounds[:-1], bounds[1:]), area


def _assign(cells: Ints, holder: Ints, cell_area: Floats, excess: Ints, slack: float) -> Ints:
    """The team that computes each cell, after teams with an excess of area have given some away."""
    computes = holder.copy()
    before = [0.0, *np.cumsum(cell_area).tolist()]  # area of the cells before a cell
    rows = [*cells[:, 0].tolist(), int(cells[-1, 1])]
    spans: dict[int, list[list[int]]] = {}
    for c0, last in np.stack(runs(holder[1:] != holder[:-1], len(cells)), axis=1).tolist():
        spans.setdefault(int(holder[c0]), []).append([c0, last + 1])
    givers = [(-e, team) for team, e in enumerate(excess.tolist()) if e > slack]
    takers = [(e, team) for team, e in enumerate(excess.tolist()) if e < -slack]
    heapq.heapify(givers)
    heapq.heapify(takers)
    while givers and takers:
        (surplus, giver), (deficit, taker) = givers[0], takers[0]
        surplus, deficit = -surplus, -deficit  # heaps give the smallest first
        amount = min(surplus, deficit)
        for c0, c1 in _give(spans.get(giver, []), before, rows, amount, slack):
            computes[c0:c1] = taker
        for heap, left, team in (
            (givers, surplus - amount, giver),
            (takers, deficit - amount, taker),
        ):
            heapq.heappop(heap)
            if left > slack:
                heapq.heappush(heap, (-left, team))
    return computes


def _give(
    spans: list[list[int]], before: list[float], rows: list[int], amount: float, slack: float
) -> list[tuple[int, int]]:
    """Cut cells worth about ``amount`` off ``spans``, in place; returns the ranges of cells."""
    given = []
    for span in reversed(spans):
        if amount <= slack:
            break
        c0, c1 = span
        if before[c1] == before[c0]:
            continue
        tail = _closest(before, before[c1] - amount, c0, c1)
        head = _closest(before, before[c0] + amount, c0, c1)
        if rows[c1] - rows[tail] <= rows[head] - rows[c0]:
            cut, span[1] = (tail, c1), tail
        else:
            cut, span[0] = (c0, head), head
        if cut[0] < cut[1]:
            given.append(cut)
            amount -= before[cut[1]] - before[cut[0]]
    return given


def _closest(before: list[float], area: float, c0: int, c1: int) -> int:
    """The cell boundary in c0..c1 that has the area nearest to ``area`` before it."""
    low = min(max(bisect_right(before, area, c0, c1 + 1) - 1, c0), c1)
    high = min(max(bisect_left(before, area, c0, c1 + 1), c0), c1)
    return low if area - before[low] <= before[high] - area else high


def area_per_cell(slices: Slices, bounds: Ints) -> Floats:
    """float64[m]: pairs whose rows are in each cell, between two of int64[m + 1] bounds."""
    _, cell, parts = cut_rows(slices, columns(bounds[:-1], bounds[1:]))
    return np.bincount(cell, areas(parts), minlength=len(bounds) - 1).astype(np.float64)
