"""Work on a grid of teams, where rows and keys both move, each to few teams.

The teams, in order, are divided into equal blocks. Keys stay inside their block: a team attends all
keys of its block, for its own rows and for those of the teams with the same place in the other
blocks. Twelve teams in three blocks, and the tile of team 5, which has place 1 of block 1:

                 keys of block 0   1   2
    rows of place 0         .      .   .
                  1         .      5   .       rows of teams 1, 5 and 9, keys of teams 4 to 7
                  2         .      .   .
                  3         .      .   .

With T teams in B blocks a team receives the keys of T / B - 1 others and the rows of B - 1, where
owners of rows would receive the keys of T - 1. With zigzag shards of a causal mask each team has
the same work, as each pair of teams has the same number of pairs of tokens. (Mesh-Attention, Chen
et al., arXiv:2512.20968, 2025, has such tiles. Here blocks are of neighbours, thus of whole hosts
where the number of hosts can be divided, and such a host needs the keys of its block alone.)
"""

from __future__ import annotations

import math

from ...arrays import Ints, columns
from ...layout import Layout
from ...mask.intervals import runs, touched
from ...mask.slices import K0, Q0, Slices, cut_keys, cut_rows
from .work import Work, with_team

# Parts of a team: more make kernel calls of many slices, and take long to plan.
MOST_TILES = 64


def numbers_of_blocks(teams: int) -> list[int]:
    """In how many blocks so many teams may be divided, the fewest first. With more than the root of
    their number, more rows would move than keys."""
    return [n for n in range(2, math.isqrt(teams) + 1) if teams % n == 0]


def tiled(
    slices: Slices, q_layout: Layout, k_layout: Layout, team_size: int, blocks: int
) -> Work | None:
    """The work of every team of a grid with so many ``blocks``; None where a team has more than
    MOST_TILES parts on average, as with striped layouts."""
    teams = q_layout.group_size // team_size
    places, most = teams // blocks, teams * MOST_TILES
    rows = _joined(q_layout, q_layout.pieces[:, 0] // team_size % places)
    keys = _joined(k_layout, k_layout.pieces[:, 0] // team_size // places)
    if _cuts(slices, rows, Q0) > most:
        return None
    _, row, parts = cut_rows(slices, rows[:, 1:])
    if _cuts(parts, keys, K0) > most:
        return None
    x, key, tiles = cut_keys(parts, keys[:, 1:])
    return with_team(tiles, keys[key, 0] * places + rows[row[x], 0])


def _cuts(slices: Slices, tiles: Ints, column: int) -> int:
    """Into how many parts the rows, or keys, that begin in a column of slices are cut."""
    first, last = touched(slices[:, column], slices[:, column + 1], tiles[:, 1:])
    return int((last - first).sum())


def _joined(layout: Layout, group: Ints) -> Ints:
    """int64[n, 3]: group, start and stop of a layout's pieces, neighbours of one group joined."""
    pieces = layout.pieces
    firsts, lasts = runs(group[1:] != group[:-1], len(pieces))
    return columns(group[firsts], pieces[firsts, 1], pieces[lasts, 2])
