"""Prefix trees on ranks, so that paths stay together: a token's keys are on its path to the root.

Ranks, and tokens with them, are halved again and again (or cut into as many sides as the next prime
factor of the number of ranks, and into hosts first of all). So what is near in the tree is on few
ranks. In each cut, a subtree of few tokens is kept whole, as a document is, and the nodes above
such subtrees are documents of their own. Few tokens are as many as a side holds, or a fraction of
that. With smaller subtrees the result is more often even; larger ones need the keys of their
ancestors on fewer sides. All these limits are tried, and so are a cut into all ranks at once and
contiguous tokens. Of the results that are even, the one that moves the fewest keys is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...arrays import Bools, Ints, columns
from ...mask.intervals import union
from ...mask.prefix_trees import is_prefix_tree
from ...mask.slices import K0, K1, Q0, Q1, Slices, areas, cut_rows
from ..layout_tables import in_order
from .document_areas import DocumentAreas, distinct, document_bounds
from .split_documents import split_documents
from .whole_documents import whole_documents

# Up to this ratio, lowering the largest area over the mean is not worth moving more keys.
EVEN = 1.05
# The most tokens of a subtree that is kept whole, as fractions of a side's.
SHARES = (1.0, 0.5, 0.25)


def assign_subtrees(
    slices: Slices, total: int, sizes: Ints, most: float, hosts: int = 1
) -> Ints | None:
    """int64[n, 3] token ranges (rank, start, stop) of a prefix tree that give each rank
    ``sizes[rank]`` tokens, and at most EVEN times the mean area, or ``most`` times where that is
    not found. None if the mask is not a prefix tree, or if neither is found.

    Args:
        slices: normalised int64[m, 6] of a mask with ``total`` queries and ``total`` keys.
        hosts: number of hosts, of as many ranks each. Few keys crossing between hosts comes before
            few crossing between ranks.
    """
    if not is_prefix_tree(slices):
        return None
    everything, ranks = np.array([[0, total]]), len(sizes)
    inside = ranks // hosts
    ways = {(ranks,), tuple(prime_factors(ranks))}
    if hosts > 1:
        ways |= {(hosts, inside), (hosts, *prime_factors(inside))}
    tables = [_cut(slices, everything, sizes, each) for each in sorted(ways)]
    contiguous = in_order(np.append(0, np.cumsum(sizes)))
    table = _best(slices, [contiguous, *tables], EVEN, inside)
    area, _ = work_of_ranks(slices, table, ranks)
    return table if area.max() <= max(EVEN, most) * area.mean() else None


def prime_factors(number: int) -> Iterator[int]:
    """The prime factors of ``number``, 1 or more, in rising order."""
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            yield factor
            number //= factor


def _cut(slices: Slices, held: Ints, sizes: Ints, ways: tuple[int, ...]) -> Ints:
    """int64[n, 3] ranges by rank and then by start: the tokens of ``held``, int64[m, 2] sorted
    ranges, cut into ``ways[0]`` sides of as many ranks, each side into ``ways[1]``, and so on."""
    if len(sizes) == 1 or len(held) == 0:
        return np.insert(held, 0, 0, axis=1)
    of_sides = sizes.reshape(ways[0], -1)
    even = 1 + (EVEN - 1) / len(ways)  # so that all cuts together may come out even
    table = _best(slices, [*_cuts(slices, held, of_sides.sum(axis=1))], even)
    each = []
    for side, own in enumerate(of_sides):
        part = _cut(slices, table[table[:, 0] == side, 1:], own, ways[1:])
        each.append(part + np.array([side * len(own), 0, 0]))
    return np.concatenate(each)


def _best(slices: Slices, tables: Sequence[Ints], even: float, ranks_of_host: int = 1) -> Ints:
    """The table with the fewest keys that hosts need, then that ranks need, then the fewest ranges,
    of those whose largest area over the mean is at most ``even``, or else the least."""

    def score(table: Ints) -> tuple[float, int, int, int]:
        size = int(table[:, 0].max()) + 1
        area, keys = work_of_ranks(slices, table, size)
        of_hosts = np.column_stack([table[:, 0] // ranks_of_host, table[:, 1:]])
        _, into_hosts = work_of_ranks(slices, of_hosts, size)
        uneven = max(float(area.max()) / max(area.mean(), 1), even)
        return uneven, int(into_hosts.sum()), int(keys.sum()), len(table)

    return min(tables, key=score)


def _cuts(slices: Slices, held: Ints, sizes: Ints) -> Iterator[Ints]:
    """Tables of ways to share out the tokens of ``held`` among sides of ``sizes`` tokens."""
    total, most = int(held[-1, 1]), [int(share * sizes.max()) for share in SHARES]
    each = {cut.tobytes(): cut for cut in (subtree_bounds(slices, total, n) for n in most)}
    for bounds in each.values():
        bounds = distinct(np.concatenate([bounds, held.reshape(-1)]))
        parts = DocumentAreas.between([(slices, 1.0)], bounds)
        (own,) = _inside(bounds[:-1], held).nonzero()
        mine = parts.some(own, parts.even_half)
        for table in (whole_documents(mine, sizes, EVEN), split_documents(mine, sizes)):
            if table is None:
                continue
            side, start, stop = table.T
            of = mine.bounds.searchsorted(start, side="right") - 1
            back = bounds[own][of] - mine.bounds[of]  # from tokens held to those of the sequence
            table = columns(side, start + back, stop + back)
            yield table[np.lexsort((table[:, 1], table[:, 0]))]


def _inside(tokens: Ints, held: Ints) -> Bools:
    """Whether each of ``tokens`` is in one of the sorted ranges ``held``, int64[m, 2]."""
    n = held[:, 0].searchsorted(tokens, side="right") - 1
    return (n >= 0) & (tokens < held[n, 1])


def subtree_bounds(slices: Slices, total: int, most: int) -> Ints:
    """int64[n + 1]: bounds of the largest subtrees of at most ``most`` tokens, and of nodes that
    are in none of them."""
    large = slices[:, Q1] - slices[:, Q0] > most
    nodes = slices[large][:, [K0, K1]].reshape(-1)
    return distinct(np.concatenate([document_bounds(slices[~large], total), nodes]))


def work_of_ranks(slices: Slices, table: Ints, group_size: int) -> tuple[Ints, Ints]:
    """Two int64[group_size]: pairs of each rank, and keys that its rows attend."""
    rank, start, stop = table[np.argsort(table[:, 1])].T
    _, at, parts = cut_rows(slices, columns(start, stop))
    of = rank[at]
    keys = union(of, parts[:, K0], parts[:, K1])
    area = np.bincount(of, areas(parts), minlength=group_size)
    needed = np.bincount(keys[:, 0], keys[:, 2] - keys[:, 1], minlength=group_size)
    return area.astype(np.int64), needed.astype(np.int64)
