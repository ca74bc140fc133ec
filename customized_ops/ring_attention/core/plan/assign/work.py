"""Which rank computes which part of the mask.

Work is the mask's slices, cut and assigned: int64[n, 7], a slice and the team that computes it. A
team is the ranks that share out the heads of the same work; without a split of heads it is one
rank. Everything else of a plan follows from its work: a team needs the rows and the keys of its
slices, and a row's result is merged from all teams that have a part of it.

Five ways to place work, each a function here, in :mod:`.even_work` or in :mod:`.tiled_work`:

    keys move    the holder of the rows computes; the usual ring attention          owned
    rows move    the holder of the keys computes, where rows are fewer than keys    nearest
    either       holders of rows and of keys each compute some, to be even          shared
    both move    a third rank computes, where a rank has too much work              evened
    both move    ranks form a grid, and each has rows and keys of few others        tiled
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...arrays import Bools, Floats, Ints
from ...layout import Layout
from ...mask.intervals import touched, union
from ...mask.slices import K0, K1, Q0, Q1, Slices, areas, cut_keys, cut_rows

Work = npt.NDArray[np.int64]  # [n, 7]: the six columns of a slice, then TEAM
TEAM = 6
TILE_ROWS = 128  # of kernels' tiles: work is cut at whole ones where that is fine enough

# Rows move instead of keys where that leaves at most this fraction of the bytes: their results come
# back and are merged, and there is one more step to wait for.
FEWER_BYTES = 0.8
# Parts (slice x holder of keys) above which no search for rows to move is made.
MAX_PARTS = 1 << 20


def with_team(slices: Slices, team: Ints) -> Work:
    return np.concatenate([slices, team[:, None]], axis=1)


def area_per_team(work: Work, teams: int) -> Floats:
    """float64[teams]: pairs that each team computes."""
    area = np.bincount(work[:, TEAM], areas(work[:, :TEAM]), minlength=teams)
    return area.astype(np.float64)


def owned(slices: Slices, layout: Layout, team_size: int) -> Work:
    """The holder of a row computes it; a slice of work is within one piece of the layout."""
    pieces = layout.pieces
    _, piece, parts = cut_rows(slices, pieces[:, 1:3])
    return with_team(parts, pieces[piece, 0] // team_size)


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
    holder = pieces[:, 0] // team_size
    first, last = touched(work[:, K0], work[:, K1], pieces[:, 1:3])
    if (last - first).sum() > MAX_PARTS or not _rows_may_move(work, last - first, holder, row_cost):
        return work
    x, piece, parts = cut_keys(work[:, :TEAM], pieces[:, 1:3])
    here, there = work[x, TEAM], holder[piece]
    moves = _rows_move(here, there, parts, row_cost)
    if not moves.any():
        return work
    torn = np.zeros(len(work), dtype=bool)
    torn[x[moves]] = True
    split = torn[x]
    team = np.where(moves, there, here)[split]
    return np.concatenate([work[~torn], with_team(parts[split], team)])


def _rows_may_move(work: Work, pieces: Ints, holder: Ints, row_cost: float) -> bool:
    """Whether sending rows could save the busiest team a good part of its bytes. This is cheap to
    check, and False for documents that are split over many ranks, and for full masks of as many
    rows as keys.

    Rows go to each team that has some of their keys: to about half as many as there are pieces, but
    to no fewer than it takes if each has as many pieces as the one that has the most. (In very
    uneven layouts it may be fewer, and some rows that could move do not.)

    Args:
        pieces: of each slice, how many pieces of the layout its keys are in.
        holder: of each piece, the team.
    """
    if len(work) == 0:
        return False
    team, keys, rows = work[:, TEAM], _each_once(work, K0), _each_once(work, Q0)
    most = int(np.bincount(holder, minlength=1).max())
    holders = np.maximum(np.minimum(pieces, holder.max(initial=0) + 1) // 2, -(-pieces // most))
    least = np.minimum(keys, rows * row_cost * holders)
    all_keys, fewest = np.bincount(team, keys), np.bincount(team, least)
    busiest = int(np.argmax(all_keys))
    return bool(fewest[busiest] < FEWER_BYTES * all_keys[busiest])


def _each_once(work: Work, start: int) -> Floats:
    """float64[n]: the tokens of each part of work, from column ``start`` to the next. Those that
    several parts of a team have are shared out among these, as if all parts had as many of them."""
    team, tokens = work[:, TEAM], work[:, start + 1] - work[:, start]
    merged = union(team, work[:, start], work[:, start + 1])
    once = np.bincount(merged[:, 0], merged[:, 2] - merged[:, 1])
    return tokens * (once / np.maximum(np.bincount(team, tokens), 1))[team]


def _rows_move(here: Ints, there: Ints, parts: Slices, row_cost: float) -> Bools:
    """For each part, whether its rows move to its keys; none where that leaves the busiest team
    with about as much to receive."""
    n = int(max(here.max(initial=0), there.max(initial=0))) + 1
    pair = here * n + there
    away = here != there
    rows, keys = parts[:, [Q0, Q1]], parts[:, [K0, K1]]
    slim = (rows[:, 1] - rows[:, 0]) * row_cost < FEWER_BYTES * (keys[:, 1] - keys[:, 0])

    def tokens(ranges: Ints, which: Bools) -> Floats:
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
