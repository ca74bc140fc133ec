"""Joins slices whose union is a slice, because fewer slices are fewer calls."""

from __future__ import annotations

import numpy as np

from ...arrays import Ints
from ...mask.slices import HI, K0, LO, Q0, Q1, Slices, areas

# Along columns, rows and diagonals: how many rows and keys further a slice that continues another
# one may start.
FURTHER = np.array([[1, 0], [0, 1], [-1, -1]])


def join(slices: Slices) -> Slices:
    """The same pairs in fewer slices, normalised, disjoint and in no particular order: two become
    one where their union is a slice.

    Slices never become a single diagonal: documents of one token look like one, and they share a
    call with any other documents as they are.
    """
    while not _are_apart(slices) and len(joined := _joined_once(slices)) < len(slices):
        slices = joined
    return slices


def _are_apart(slices: Slices) -> bool:
    """Whether no two slices have a row or a key in common and their keys are in the order of their
    rows, as in documents. From one row of a slice to the next, its keys start and stop at the same
    key or one further, so the union of two such slices is no slice, except a single diagonal."""
    slices = slices[slices[:, Q0].argsort()]
    starts, stops = slices[:, Q0:LO:2], slices[:, Q1:LO:2]
    return bool((stops[:-1] <= starts[1:]).all())


def _joined_once(slices: Slices) -> Slices:
    """One round, in which each slice joins once at most: blocks of a staircase grow together."""
    a, b = _neighbours(slices)
    if len(a) == 0:
        return slices
    hulls = _hulls(slices[a], slices[b])
    wide = hulls[:, LO] < hulls[:, HI]
    pairs = areas(np.concatenate([slices, hulls]))
    (exact,) = (wide & (pairs[len(slices) :] == pairs[a] + pairs[b])).nonzero()
    gone = np.zeros(len(slices), dtype=bool)
    chosen = []
    for n, first, second in zip(exact, a[exact], b[exact], strict=True):
        if not (gone[first] or gone[second]):
            gone[[first, second]] = True
            chosen.append(n)
    return np.concatenate([slices[~gone], hulls[chosen]]) if chosen else slices


def _neighbours(slices: Slices) -> tuple[Ints, Ints]:
    """Indices of slices a and b where b may continue a: first in the next column, then in the next
    row, then on the next diagonal.

    A slice that continues a starts beside where a's last column, row or diagonal starts, or one
    further. Slices are disjoint, so a cell is in one at most, and a lookup finds b. The first cell
    of a slice's first row and column is its top left corner, because bounds are tight.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    rows, keys = np.array([[q0, q0, k0 - lo], [k0, k0, k0]])
    next_rows = np.array([np.maximum(q0, k1 - 1 - hi), q1, q0])
    next_keys = np.array([k1, np.maximum(k0, q1 - 1 + lo), q0 + hi + 1])
    # Cells become numbers; those of a direction come after those of the direction before it.
    height, stride = int(q1.max()) + 2, int(k1.max()) + 2
    above = np.array([[1], [1 + height], [1 + 2 * height]])
    have = ((above + rows) * stride + keys).reshape(-1)
    beside = (above + next_rows) * stride + next_keys
    want = np.array([beside, beside + FURTHER @ [[stride], [1]]]).transpose(1, 0, 2).reshape(-1)
    order = have.argsort()
    have = have[order]
    at = np.minimum(have.searchsorted(want), len(have) - 1)
    (hit,) = (have[at] == want).nonzero()
    return hit % len(slices), order[at[hit]] % len(slices)


def _hulls(a: Slices, b: Slices) -> Slices:
    """The smallest slices that hold both. If the union of two is a slice, it is this one, since
    bounds are tight; and it is one if the areas add up, since the two are disjoint."""
    hulls = np.maximum(a, b)
    starts = [Q0, K0, LO]
    hulls[:, starts] = np.minimum(a, b)[:, starts]
    return hulls
