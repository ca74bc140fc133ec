"""Prefix trees on ranks, so that paths stay together: a token's keys are on its path to the root.

A subtree of few tokens is kept whole, as a document is, and the nodes above such subtrees are
documents of their own. Few tokens are as many as a rank holds, or a part of that: smaller subtrees
come out even more often, larger ones need the keys of their ancestors on fewer ranks. All are
tried, and of those that are even the one is taken that moves the fewest keys.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Ints
from ..mask.intervals import union
from ..mask.prefix_trees import is_prefix_tree
from ..mask.slices import K0, K1, Q0, Q1, Slices, areas, cut_rows
from .documents import DocumentAreas, distinct, document_bounds
from .split_documents import split_documents
from .whole_documents import whole_documents

# The most tokens of a subtree that is kept whole, in parts of a rank's.
SHARES = (1.0, 0.5, 0.25)


def assign_subtrees(slices: Slices, total: int, sizes: Ints, most: float) -> Ints | None:
    """int64[n, 3] token ranges (rank, start, stop) of a prefix tree that give each rank
    ``sizes[rank]`` tokens, and at most ``most`` times the mean area; None if it is no prefix tree,
    or no way is found.

    Args:
        slices: normalised int64[m, 6] of a mask with ``total`` queries and ``total`` keys.
    """
    if not is_prefix_tree(slices):
        return None
    found: list[tuple[int, int, Ints]] = []
    for share in SHARES:
        bounds = subtree_bounds(slices, total, int(share * sizes.max()))
        parts = DocumentAreas.between([(slices, 1.0)], bounds)
        for table in (whole_documents(parts, sizes, most), split_documents(parts, sizes)):
            if table is None:
                continue
            area, keys = work_of_ranks(slices, table, len(sizes))
            if area.max() <= most * area.mean():
                found.append((int(keys.sum()), len(table), table))
    return min(found, key=lambda each: each[:2])[2] if found else None


def subtree_bounds(slices: Slices, total: int, most: int) -> Ints:
    """int64[n + 1]: bounds of the largest subtrees of at most so many tokens, and of the nodes that
    are in none."""
    large = slices[:, Q1] - slices[:, Q0] > most
    nodes = slices[large][:, [K0, K1]].reshape(-1)
    return distinct(np.concatenate([document_bounds(slices[~large], total), nodes]))


def work_of_ranks(slices: Slices, table: Ints, group_size: int) -> tuple[Ints, Ints]:
    """Two int64[group_size]: pairs of each rank, and keys that its rows attend."""
    rank, start, stop = table[np.argsort(table[:, 1])].T
    _, at, parts = cut_rows(slices, np.stack([start, stop], axis=1))
    of = rank[at]
    keys = union(of, parts[:, K0], parts[:, K1])
    area = np.bincount(of, areas(parts), minlength=group_size)
    needed = np.bincount(keys[:, 0], keys[:, 2] - keys[:, 1], minlength=group_size)
    return area.astype(np.int64), needed.astype(np.int64)
