"""Documents of a mask: stretches of tokens that attend nothing outside and are not attended from
there. A layout needs to know little about them: where each starts, how many pairs it attends, and
whether its early rows attend fewer than its late ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...arrays import Bools, Floats, Ints, columns
from ...mask.intervals import union
from ...mask.slices import K0, K1, Q0, Q1, Slices, areas, cut_rows

Weighted = Sequence[tuple[Slices, float]]  # a mask and the weight of its area

# A document is even if the first half of its rows has half of its area, up to this fraction.
EVEN_HALF = 0.05


def document_bounds(slices: Slices, total: int) -> Ints:
    """int64[n + 1]: bounds of the shortest stretches that attend only themselves.

    Args:
        slices: normalised int64[m, 6] of a mask with ``total`` queries and ``total`` keys.
    """
    start = np.minimum(slices[:, Q0], slices[:, K0])
    last = np.maximum(slices[:, Q1], slices[:, K1]) - 1
    _, starts, lasts = union(np.zeros(len(slices), dtype=np.int64), start, last).T
    return distinct(np.concatenate([[0], starts, lasts + 1, [total]]))


def distinct(values: Ints) -> Ints:
    """Sorted, without duplicates; for a few hundred, several times as fast as ``np.unique``."""
    values = np.sort(values)
    return values[np.append(True, values[1:] > values[:-1])]


def area_of_ranges(weighted: Weighted, ranges: Ints) -> Floats:
    """float64[m]: the weighted area of each of int64[m, 2] disjoint row ranges, sorted."""
    area = np.zeros(len(ranges))
    for slices, weight in weighted:
        _, at, parts = cut_rows(slices, ranges)
        area += weight * np.bincount(at, areas(parts), minlength=len(ranges))
    return area


def imbalance_of(weighted: Weighted, table: Ints, group_size: int) -> float:
    """The largest weighted area of a rank over the mean; ``table``: int64[n, 3] ranges of all rows,
    (rank, start, stop)."""
    ranges = table[np.argsort(table[:, 1])]
    area = np.bincount(ranges[:, 0], area_of_ranges(weighted, ranges[:, 1:]), minlength=group_size)
    return float(area.max() / area.mean())


@dataclass(frozen=True)
class DocumentAreas:
    """Documents in the order of the sequence.

    Attributes:
        bounds: int64[n + 1], where they start and end.
        area: float64[n], the weighted pairs that each attends.
        early: float64[n], the part of ``area`` that the first half of each one's rows attends.
        even_half: how far the area of the first half may be from half of a document's area for it
            to be even, as a fraction of the document's area.
    """

    bounds: Ints
    area: Floats
    early: Floats
    even_half: float = EVEN_HALF

    @staticmethod
    def of(weighted: Weighted, total: int) -> DocumentAreas:
        """The documents of the given masks taken together."""
        slices = np.concatenate([slices for slices, _ in weighted])
        return DocumentAreas.between(weighted, document_bounds(slices, total))

    @staticmethod
    def between(weighted: Weighted, bounds: Ints) -> DocumentAreas:
        """The sequence cut at int64[n + 1] bounds, as if each part were a document."""
        middle = (bounds[:-1] + bounds[1:] + 1) // 2
        halves = distinct(np.concatenate([bounds, middle]))
        of_halves = area_of_ranges(weighted, columns(halves[:-1], halves[1:]))
        first = halves.searchsorted(bounds[:-1])
        area = np.add.reduceat(of_halves, first) if len(first) else of_halves
        return DocumentAreas(bounds, area, of_halves[first])

    def ramps_apart(self, weighted: Weighted, least: int) -> DocumentAreas:
        """The documents, those of at least ``least`` tokens cut where rows stop gaining, or start
        losing, one key per row, as under a window at its length. Then all rows of a part attend
        about as many keys, or rows at its two ends do together."""
        cuts = []
        for slices, _ in weighted:
            q0, q1, k0, k1, lo, hi = slices.T
            for row in (k0 - lo, k1 - hi):
                cuts.append(row[(row > q0) & (row < q1)])
        rows = np.concatenate(cuts)
        document = self.bounds.searchsorted(rows, side="right") - 1
        rows = rows[self.tokens[document] >= least]
        return DocumentAreas.between(weighted, distinct(np.concatenate([self.bounds, rows])))

    def some(self, which: Ints, even_half: float) -> DocumentAreas:
        """The documents ``which``, as if they followed one another."""
        bounds = np.append(0, np.cumsum(self.tokens[which]))
        return DocumentAreas(bounds, self.area[which], self.early[which], even_half)

    @cached_property
    def tokens(self) -> Ints:
        """int64[n]: length of each."""
        return np.diff(self.bounds)

    @cached_property
    def uneven(self) -> Bools:
        """bool[n]: whether the two halves of its rows differ in area, as under a causal mask."""
        return np.abs(self.early - self.area / 2) > self.even_half * self.area
