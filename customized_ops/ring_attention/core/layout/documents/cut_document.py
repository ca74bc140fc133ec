"""Packed documents on a few ranks, one of them cut in two and all others whole, for short passes.

Where one document is too much for a rank, its first part goes to one rank, and its second part to
another. Under a causal mask only the second needs keys of the other. So keys move in one direction,
each rank attends all it holds in one call, and what moves is of few lengths. Passes over other
documents are then often launched alike. (Cut from both ends, as :mod:`.split_documents` does, both
ranks need keys of each other, and one has parts that share keys. That is more even.)
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...arrays import Ints
from .document_areas import DocumentAreas, Weighted, distinct, imbalance_of
from .whole_documents import ROOM, least_area, whole_documents

# Over more ranks such an assignment is rarely found. (Of batches whose whole documents are uneven,
# it was for 14 of 17 over 2 ranks with 8k tokens each, and for 13 of 80 over 4.)
MOST_RANKS = 4
# Lengths of a first part are multiples of a rank's tokens divided by these numbers, as a power of
# two; the coarser are tried first.
STEPS = 8, 16
# The part of a document's keys that is sent at most. (Where ranks compute as much of it as each
# other, it is about 0.7. Cut from both ends, both together send about 0.75.)
MOST_SENT = 0.9


def cut_document(
    weighted: Weighted, documents: DocumentAreas, sizes: Ints, most: float
) -> Ints | None:
    """int64[n, 3] token ranges (rank, start, stop), the parts of the document first on each rank,
    that give each rank ``sizes[rank]`` tokens and at most ``most`` times the mean area; None where
    that is not found.

    Args:
        weighted: the masks of ``documents``, and their weights.
    """
    bounds, ranks = documents.bounds, len(sizes)
    largest = int(documents.area.argmax())
    if ranks > MOST_RANKS or len(documents.area) < 2 or not documents.uneven[largest]:
        return None
    mean = documents.area.sum() / ranks
    rest = documents.some(np.delete(np.arange(len(documents.area)), largest), 0.0)
    if least_area(rest, int(sizes.min())) > ROOM * most * mean:
        return None  # another document is too much for a rank as well
    start, stop = bounds[largest : largest + 2].tolist()
    least, longest = max(stop - start - int(sizes.min()), 1), int(MOST_SENT * (stop - start))
    for first in _multiples(int(sizes.max()), least, longest):
        cut = start + first
        parts = DocumentAreas.between(weighted, distinct(np.append(bounds, cut)))
        table = whole_documents(parts, sizes, most)
        if table is not None and imbalance_of(weighted, table, ranks) <= most:
            is_whole = (table[:, 1] != start) & (table[:, 1] != cut)
            return table[np.lexsort((table[:, 1], is_whole, table[:, 0]))]
    return None


def _multiples(tokens: int, least: int, most: int) -> Iterable[int]:
    """The lengths, the coarser first, that a first part may have where ranks hold ``tokens``."""
    steps = [max(1 << (tokens // parts).bit_length() >> 1, 1) for parts in STEPS]
    return dict.fromkeys(n for s in steps for n in range(-(-least // s) * s, most + 1, s))
