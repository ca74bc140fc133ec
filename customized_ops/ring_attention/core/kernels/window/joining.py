"""Slices whose union is a slice become one: fewer slices are fewer calls."""

from __future__ import annotations

import numpy as np

from ...arrays import Ints
from ...mask.slices import HI, K0, K1, LO, Q0, Q1, Slices, areas

DIRECTIONS = "columns", "rows", "diagonals"


def join(slices: Slices) -> Slices:
    """The same pairs in fewer slices, normalised, disjoint and in no particular order: two become
    one where their union is a slice.

    They do not become a single diagonal: documents of one token look like that, and they go with
    any other documents as they are.
    """
    while not _are_apart(slices) and len(joined := _joined_once(slices)) < len(slices):
        slices = joined
    return slices


def _are_apart(slices: Slices) -> bool:
    """Whether no two slices have a row or a key in common and their keys are in order of their
    rows, as those of documents. From one row of a slice to the next its keys start and stop at the
    same ones or at those after them, so the union of two such is no slice but a single diagonal."""
    slices = slices[slices[:, Q0].argsort()]
    return bool((slices[:-1, [Q1, K1]] <= slices[1:, [Q0, K0]]).all())


def _joined_once(slices: Slices) -> Slices:
    """Each slice once at a time, so that the blocks of a staircase all grow together."""
    found = [_neighbours(along, slices) for along in DIRECTIONS]
    a, b = (np.concatenate(n) for n in zip(*found, strict=True))
    if len(a) == 0:
        return slices
    hulls = _hulls(slices[a], slices[b])
    wide = hulls[:, LO] < hulls[:, HI]
    pairs, of_hulls = np.split(areas(np.concatenate([slices, hulls])), [len(slices)])
    exact = np.flatnonzero(wide & (of_hulls == pairs[a] + pairs[b]))
    gone = np.zeros(len(slices), dtype=bool)
    chosen = []
    for n, first, second in zip(exact, a[exact], b[exact], strict=True):
        if not (gone[first] or gone[second]):
            gone[[first, second]] = True
            chosen.append(n)
    return np.concatenate([slices[~gone], hulls[chosen]]) if chosen else slices


def _neighbours(along: str, slices: Slices) -> tuple[Ints, Ints]:
    """Indices of slices a and b where b may continue a: in the next of the columns, rows or
    diagonals.

    What continues a starts beside where a's last column, row or diagonal starts, or one further.
    Slices are disjoint, so a cell is in one at most, and a lookup finds b. The first cell of a
    slice's first row and column is its top left corner, as bounds are tight.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    if along == "columns":
        starts, (i, j), further = (q0, k0), (np.maximum(q0, k1 - 1 - hi), k1), (1, 0)
    elif along == "rows":
        starts, (i, j), further = (q0, k0), (q1, np.maximum(k0, q1 - 1 + lo)), (0, 1)
    else:
        starts, (i, j), further = (k0 - lo, k0), (q0, q0 + hi + 1), (-1, -1)
    stride = int(k1.max()) + 2  # cells become numbers
    have = starts[0] * stride + starts[1]
    order = have.argsort()
    have = have[order]
    want = np.concatenate([i * stride + j, (i + further[0]) * stride + j + further[1]])
    at = np.minimum(have.searchsorted(want), len(have) - 1)
    (hit,) = (have[at] == want).nonzero()
    return hit % len(have), order[at[hit]]


def _hulls(a: Slices, b: Slices) -> Slices:
    """The least slices that hold both. If the union of two is a slice, it is this one, since bounds
    are tight; and it is one if the areas add up, since the two are disjoint."""
    hulls = np.maximum(a, b)
    starts = [Q0, K0, LO]
    hulls[:, starts] = np.minimum(a, b)[:, starts]
    return hulls
