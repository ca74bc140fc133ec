"""Documents on ranks: whole where that is even, else in order where that is, else the largest of
them split over a few ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Ints
from .documents import DocumentAreas, Weighted, area_of_ranges
from .layout_tables import even_bounds, in_order
from .split_documents import split_documents
from .whole_documents import AS_EVEN, whole_documents

# Pairs of 32 heads that take as long as another kernel call and its merge do at the least (100 us
# on an H200): so much more on one rank is better than documents split.
CALL_PAIRS = 1 << 20
# The largest area over the mean that is not worth a search, which takes seconds for many ranks.
ENOUGH = 1.05


class DocumentAssignment(NamedTuple):
    """Documents on ranks: int64[n, 3] ranges of tokens (rank, start, stop), by rank, each rank's
    parts of split documents first; the area of the rank with the most over the mean; and whether
    it is no use to look for a better assignment."""

    table: Ints
    imbalance: float
    good: bool


def assign_documents(weighted: Weighted, total: int, group_size: int) -> DocumentAssignment | None:
    """Documents assigned so that ranks hold as many tokens as if all were in order.

    Args:
        weighted: normalised slices of a mask over ``total`` tokens, and its weight, above 0.
    Returns:
        None where nothing is attended.
    """
    documents = DocumentAreas.of(weighted, total)
    if not documents.area.any():
        return None
    bounds = even_bounds(total, group_size)
    sizes = np.diff(bounds)
    mean = documents.area.sum() / group_size
    enough = max(AS_EVEN, 1 + CALL_PAIRS * sum(weight for _, weight in weighted) / mean)
    table = whole_documents(documents, sizes, enough)
    if table is not None and (imbalance := _imbalance(weighted, table, group_size)) <= enough:
        return DocumentAssignment(table, imbalance, True)
    # Of the ranks that a document in order is on at the most, one attends so much at the least.
    least = (documents.area / (2 + (documents.tokens - 2) // sizes[0])).max()
    if least <= AS_EVEN * mean:
        table = in_order(bounds)
        if (imbalance := _imbalance(weighted, table, group_size)) <= AS_EVEN:
            return DocumentAssignment(table, imbalance, True)
    table = split_documents(documents, sizes)
    imbalance = _imbalance(weighted, table, group_size)
    several = len(documents.area) > 1
    return DocumentAssignment(table, imbalance, imbalance <= (ENOUGH if several else AS_EVEN))


def _imbalance(weighted: Weighted, table: Ints, group_size: int) -> float:
    ranges = table[np.argsort(table[:, 1])]
    area = np.bincount(ranges[:, 0], area_of_ranges(weighted, ranges[:, 1:]), minlength=group_size)
    return float(area.max() / area.mean())
