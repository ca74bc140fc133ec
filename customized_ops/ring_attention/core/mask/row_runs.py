"""Makes band slices from what each row attends: exactly, and few of them.

A run is the keys start .. stop - 1 of one row. It continues in the row below as a run whose start
is the same or one more, and whose stop is too. A band slice is a chain of runs whose starts first
stay the same and then go up, and whose stops first go up and then stay the same:

    x . . . . .      start 0 0 0 1 2    one chain, (0, 5, 0, 4, -2, 0)
    x x . . . .      stop  1 2 3 4 4
    x x x . . .
    . x x x . .
    . . x x . .

This uses numpy alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import columns
from .slices import Slices, normalise

Runs = npt.NDArray[np.int64]  # [n, 3]: row, start, stop; by row, then by start; none touch


def runs_of(dense: npt.NDArray[np.bool_], first_row: int = 0) -> Runs:
    """The runs of consecutive rows.

    Args:
        dense: bool[rows, keys], True where a pair attends.
        first_row: the number of the first row.
    """
    rows, keys = dense.shape
    padded = np.zeros((rows, keys + 2), dtype=bool)
    padded[:, 1:-1] = dense
    # In each row a start, a stop, a start, ...
    edges = np.flatnonzero(padded[:, 1:] != padded[:, :-1])
    row, key = np.divmod(edges, keys + 1)
    return columns(row[::2] + first_row, key[::2], key[1::2])


def slices_of_runs(runs: Runs) -> Slices:
    """Disjoint slices that cover exactly these runs, ordered by their first rows."""
    if not len(runs):
        return np.zeros((0, 6), dtype=np.int64)
    below = _below(runs)
    head = _heads(below)
    tail = np.empty(len(runs), dtype=np.int64)
    last = np.flatnonzero(below < 0)
    tail[head[last]] = last
    first = np.flatnonzero(head == np.arange(len(runs)))
    (q0, k0, stop0), (q1, start1, k1) = runs[first].T, runs[tail[first]].T
    return normalise(columns(q0, q1 + 1, k0, k1, start1 - q1, stop0 - 1 - q0))


def _below(runs: Runs) -> npt.NDArray[np.int64]:
    """For each run the one that continues it in its slice, or -1."""
    row, start, stop = runs.T
    width = int(stop.max()) + 2
    place = row * width + start
    below = np.full(len(runs), -1)
    step = np.zeros((len(runs), 2), dtype=np.int64)  # of start and of stop
    for right in (0, 1):  # no two runs of a row can both continue one: they would touch
        wanted = place + width + right
        found = np.minimum(np.searchsorted(place, wanted), len(runs) - 1)
        grown = stop[found] - stop
        fits = (place[found] == wanted) & ((grown == 0) | (grown == 1))
        below[fits] = found[fits]
        step[fits] = columns(np.full(int(fits.sum()), right), grown[fits])
    # In a slice, a start that has gone up keeps going up, and a stop that has stayed keeps staying.
    linked = np.flatnonzero(below >= 0)
    after = below[linked]
    turned = (step[linked, 0] > step[after, 0]) | (step[linked, 1] < step[after, 1])
    below[after[turned & (below[after] >= 0)]] = -1
    return below


def _heads(below: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each run the first run of its chain, by pointers that jump twice as far each time."""
    head = np.arange(len(below))
    linked = np.flatnonzero(below >= 0)
    head[below[linked]] = linked
    while True:
        further = head[head]
        if np.array_equal(further, head):
            return head
        head = further
