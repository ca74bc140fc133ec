"""Which rank computes which part of the mask.

Work is the mask's slices, cut and dealt out: int64[n, 7], a slice and the team that computes it. A
team is the ranks that share out the heads of the same work; without a split of heads it is one
rank. Everything else of a plan follows from its work: a team needs the rows and the keys of its
slices, and a row's result is merged from all teams that have a part of it.

Four ways to place work, and each is a step here:

    keys move    the holder of the rows computes; the usual ring attention          owned
    rows move    the holder of the keys computes, where rows are fewer than keys    nearest
    either       holders of rows and of keys each compute some, to be even          shared
    both move    a third rank computes, where a rank has too much work              evened
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..layout import Layout
from ..mask.intervals import Table, spread, touched, union
from ..mask.slices import K0, K1, Q0, Q1, Slices, areas, normalise

Work = npt.NDArray[np.int64]  # [n, 7]: a slice, and
TEAM = 6

# Imbalance left alone: moving rows costs messages, and a few percent is below what they cost.
TOLERANCE = 0.02
# Rows move instead of keys where that saves at least a fifth of the bytes: their results come back
# and are merged, and one step more is waited for.
FEWER_BYTES = 0.8
# Parts (slice x holder of keys) above which no search for rows to move is made.
MAX_PARTS = 1 << 20
# Teams between which work is shared, pair by pair, parts that lie between them, and turns for each
# pair: more would take long, or make many small calls.
MOST_SHARING, MOST_SHARED, SWEEPS = 16, 2048, 200
TILE_ROWS = 128  # where work is cut to suit kernels' tiles


def cut_rows(slices: Slices, tiles: Table) -> tuple[Table, Table, Slices]:
    """``slices`` cut at row ranges.

    Args:
        slices: normalised int64[n, 6]. tiles: int64[m, 2], sorted disjoint row ranges.
    Returns:
        (index of the slice, index of the tile, the part), the parts normalised.
    """
    x, tile = spread(*touched(slices[:, Q0], slices[:, Q1], tiles))
    parts = slices[x]
    parts[:, Q0] = np.maximum(parts[:, Q0], tiles[tile, 0])
    parts[:, Q1] = np.minimum(parts[:, Q1], tiles[tile, 1])
    return x, tile, _tight(parts)


def cut_keys(slices: Slices, tiles: Table) -> tuple[Table, Table, Slices]:
    """As :func:`cut_rows`, at key ranges."""
    x, tile = spread(*touched(slices[:, K0], slices[:, K1], tiles))
    parts = slices[x]
    parts[:, K0] = np.maximum(parts[:, K0], tiles[tile, 0])
    parts[:, K1] = np.minimum(parts[:, K1], tiles[tile, 1])
    return x, tile, _tight(parts)


def _tight(parts: Slices) -> Slices:
    tight = normalise(parts)
    assert len(tight) == len(parts), "every row and every key of a normalised slice has a pair"
    return tight


def _with_team(slices: Slices, team: Table) -> Work:
    return np.concatenate([slices, team[:, None]], axis=1)


def owned(slices: Slices, layout: Layout, team_size: int) -> Work:
    """The holder of a row computes it; a slice of work is within one piece of the layout."""
    pieces = layout.pieces
    _, piece, parts = cut_rows(slices, pieces[:, 1:3])
    return _with_team(parts, pieces[piece, 0] // team_size)


def nearest(work: Work, k_layout: Layout, team_size: int, row_cost: float) -> Work:
    """Send rows to the keys wherever that moves fewer bytes than sending keys to the rows.

    For each pair of teams the choice is between moving all keys, moving all rows, and moving the
    rows of those parts alone that have far fewer rows than keys (a few global rows beside a window,
    say).

    Args:
        work: every row computed by its holder.
        row_cost: bytes of a row, there and back, over the bytes of a key and its value.
    """
    pieces = k_layout.pieces
    first, last = touched(work[:, K0], work[:, K1], pieces[:, 1:3])
    if (last - first).sum() > MAX_PARTS:
        return work
    x, piece, parts = cut_keys(work[:, :TEAM], pieces[:, 1:3])
    here, there = work[x, TEAM], pieces[piece, 0] // team_size
    moves = _rows_move(here, there, parts, row_cost)
    if not moves.any():
        return work
    torn = np.zeros(len(work), dtype=bool)
    torn[x[moves]] = True
    split = torn[x]
    team = np.where(moves, there, here)[split]
    return np.concatenate([work[~torn], _with_team(parts[split], team)])


def _rows_move(here: Table, there: Table, parts: Slices, row_cost: float) -> npt.NDArray[np.bool_]:
    """For each part, whether its rows move to its keys; none where that leaves the busiest team
    with about as much to receive."""
    n = int(max(here.max(initial=0), there.max(initial=0))) + 1
    pair = here * n + there
    away = here != there
    rows, keys = parts[:, [Q0, Q1]], parts[:, [K0, K1]]
    slim = (rows[:, 1] - rows[:, 0]) * row_cost < FEWER_BYTES * (keys[:, 1] - keys[:, 0])

    def tokens(ranges: Table, which: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """[n, n]: tokens of these ranges per pair of teams."""
        merged = union(pair[which], ranges[which, 0], ranges[which, 1])
        count = np.bincount(merged[:, 0], merged[:, 2] - merged[:, 1], minlength=n * n)
        return count.reshape(n, n).astype(np.float64)

    all_keys, fat_keys = tokens(keys, away), tokens(keys, away & ~slim)
    all_rows, slim_rows = tokens(rows, away), tokens(rows, away & slim)
    whole, mixed = all_rows * row_cost, fat_keys + slim_rows * row_cost
    worth = np.minimum(whole, mixed) < FEWER_BYTES * all_keys
    every = worth & (whole <= mixed)
    some = worth & ~every
    keys_left = np.where(every, 0, np.where(some, fat_keys, all_keys))
    rows_sent = np.where(every, all_rows, np.where(some, slim_rows, 0))
    # Rows arrive at the one team, and about as many bytes of results come back to the other.
    load = keys_left.sum(1) + row_cost / 2 * (rows_sent.sum(0) + rows_sent.sum(1))
    if load.max() > FEWER_BYTES * all_keys.sum(1).max():
        return np.zeros(len(parts), dtype=bool)
    return away & (every[here, there] | (some[here, there] & slim))


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
    after = [work[home], _with_team(parts[here == there], here[here == there])]
    for (holder, other), fraction in _fractions_given(between).items():
        some = parts[(here == holder) & (there == other)]
        row = _row_after(some, fraction)
        tiles = np.array([[0, row], [row, q_layout.total]])
        _, _, cut = cut_rows(some, tiles[tiles[:, 0] < tiles[:, 1]])
        after.append(_with_team(cut, np.where(cut[:, Q0] < row, other, holder)))
    even = np.concatenate(after)
    return even if area_per_team(even, teams).max() < area.max() else work


def _fractions_given(between: npt.NDArray[np.float64]) -> dict[tuple[int, int], float]:
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
    before = np.concatenate([[0], np.cumsum(_area_per_cell(parts, bounds))])
    return int(bounds[np.abs(before - fraction * before[-1]).argmin()])


def evened(work: Work, layout: Layout, team_size: int) -> Work:
    """Teams with more than the mean area give rows that they hold to teams with less.

    Surpluses and deficits are matched largest first, so that at most one transfer fewer than there
    are teams is made, and each is cut from one end of a piece: the end where the rows are denser,
    because then fewer rows move.
    """
    teams = layout.group_size // team_size
    area = area_per_team(work, teams)
    mean = area.sum() / teams
    if area.max(initial=0) <= (1 + TOLERANCE) * mean:
        return work
    pieces = layout.pieces
    piece = np.searchsorted(pieces[:, 1], work[:, Q0], side="right") - 1
    giveable = work[:, TEAM] == pieces[piece, 0] // team_size
    given = work[giveable, :TEAM]
    cells, cell_area = _cells(given, layout, TOLERANCE * mean)
    holder = pieces[np.searchsorted(pieces[:, 1], cells[:, 0], side="right") - 1, 0] // team_size
    computes = _deal(cells, holder, cell_area, area - mean, TOLERANCE / 2 * mean)
    # Neighbouring cells that stay together are one range again.
    edge = np.ones(len(cells), dtype=bool)
    edge[1:] = (computes[1:] != computes[:-1]) | (holder[1:] != holder[:-1])
    heads = np.flatnonzero(edge)
    ranges = np.stack([cells[heads, 0], np.append(cells[heads[1:], 0], layout.total)], axis=1)
    _, n, parts = cut_rows(given, ranges)
    after = np.concatenate([work[~giveable], _with_team(parts, computes[heads][n])])
    return after if area_per_team(after, teams).max() < area.max() else work


def area_per_team(work: Work, teams: int) -> npt.NDArray[np.float64]:
    """float64[teams]: pairs that each team computes."""
    area = np.bincount(work[:, TEAM], areas(work[:, :TEAM]), minlength=teams)
    return area.astype(np.float64)


def _cells(slices: Slices, layout: Layout, most: float) -> tuple[Table, npt.NDArray[np.float64]]:
    """The sequence cut where work may be: at the layout's pieces, at multiples of 128 to suit
    kernels' tiles, and finer where a cell would hold an area above ``most``; with areas."""
    pieces = layout.pieces
    grid = np.arange(0, layout.total, TILE_ROWS)
    bounds = np.sort(np.concatenate([grid, pieces[:, 1], [layout.total]]), kind="stable")
    bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]
    area = _area_per_cell(slices, bounds)
    parts = np.minimum(np.ceil(area / most), np.diff(bounds)).astype(np.int64).clip(1)
    if (parts > 1).any():
        x, n = spread(np.zeros_like(parts), parts)
        inner = bounds[x] + (bounds[x + 1] - bounds[x]) * n // parts[x]
        bounds = np.append(inner, layout.total)
        area = _area_per_cell(slices, bounds)
    return np.stack([bounds[:-1], bounds[1:]], axis=1), area


def _area_per_cell(slices: Slices, bounds: Table) -> npt.NDArray[np.float64]:
    _, cell, parts = cut_rows(slices, np.stack([bounds[:-1], bounds[1:]], axis=1))
    return np.bincount(cell, areas(parts), minlength=len(bounds) - 1).astype(np.float64)


def _deal(
    cells: Table, holder: Table, cell_area: npt.NDArray[np.float64], excess: Table, slack: float
) -> Table:
    """The team that computes each cell, after teams with an excess of area have given some away."""
    computes = holder.copy()
    before = [0.0, *np.cumsum(cell_area).tolist()]  # area of the cells before a cell
    rows = [*cells[:, 0].tolist(), int(cells[-1, 1])]
    breaks = np.flatnonzero(holder[1:] != holder[:-1]) + 1
    spans: dict[int, list[list[int]]] = {}
    for c0, c1 in zip([0, *breaks.tolist()], [*breaks.tolist(), len(cells)], strict=True):
        spans.setdefault(int(holder[c0]), []).append([c0, c1])
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
    """The cell boundary in c0..c1 with nearest to ``area`` before it."""
    low = min(max(bisect_right(before, area, c0, c1 + 1) - 1, c0), c1)
    high = min(max(bisect_left(before, area, c0, c1 + 1), c0), c1)
    return low if area - before[low] <= before[high] - area else high


def _owner(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [owned(slices, q_layout, team)]


def _balanced(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [evened(owned(slices, q_layout, team), q_layout, team)]


def _nearest(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    work = nearest(owned(slices, q_layout, team), k_layout, team, cost)
    return [evened(work, q_layout, team)]


def _auto(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    at_home = owned(slices, q_layout, team)
    near = nearest(at_home, k_layout, team, cost)
    both = shared(at_home, q_layout, k_layout, team)
    evens = [evened(work, q_layout, team) for work in _distinct([at_home, near, both])]
    return _distinct([at_home, *evens])


def _distinct(works: Works) -> Works:
    """Without what is there already; a step that had nothing to do returns what it was given."""
    return [work for n, work in enumerate(works) if all(work is not other for other in works[:n])]


def _shared(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [evened(shared(owned(slices, q_layout, team), q_layout, k_layout, team), q_layout, team)]


def _zigzag(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [owned(slices, Layout.zigzag(q_layout.total, q_layout.group_size), team)]


# Ways to deal work out, by name: the mask's slices, q layout, k layout, ranks in a team and cost of
# a row -> candidates, the simplest first.
Works = list[Work]
ASSIGNMENTS: dict[str, Callable[[Slices, Layout, Layout, int, float], Works]] = {
    "auto": _auto,
    "owner": _owner,
    "balanced": _balanced,
    "nearest": _nearest,
    "shared": _shared,
    "zigzag": _zigzag,
}
