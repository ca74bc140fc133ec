"""Packed documents on ranks, none of them split: then no key crosses a link, and each rank attends
all its documents in one call.

Documents are first put on ranks in the order of the sequence. Two ranks at a time exchange some,
until each rank holds exactly its number of tokens and about the mean area. What two ranks exchange
is found by meeting in the middle (Horowitz and Sahni, 1974). A set of their documents is divided in
two, and the sums of all subsets of one half are looked up among those of the other. So every way to
assign n documents to two ranks is weighed, in the time of 2 ** (n / 2).
"""

from __future__ import annotations

import numpy as np

from ...arrays import Ints
from .document_areas import DocumentAreas

# How many documents of two ranks are reassigned at a time; how many of these have the most area.
REASSIGNED, LARGEST = 22, 8
# Steps to even out areas, and ranks that are tried in each.
STEPS, TRIED = 12, 2
# Up to AS_EVEN, the largest area over the mean is not worth improving. Another step is worth it
# where the last two left less than LESS of the largest area.
AS_EVEN, LESS = 1.01, 0.999
# Where :func:`least_area` is above this fraction of the largest useful area, a good assignment was
# hardly ever found. (In 900 batches over 4 and 8 ranks for none of 8, at up to 10 ms each; over 2
# ranks for 2 of 19.)
ROOM = 0.96
# All areas sum to this many units; they are counted next to tokens: one int64 holds both.
AREA_UNITS = 1 << 34
MOST_TOKENS = 1 << 25


def whole_documents(documents: DocumentAreas, sizes: Ints, most: float) -> Ints | None:
    """int64[n, 3] token ranges (rank, start, stop), each a document, that give each rank
    ``sizes[rank]`` tokens and about the mean area; None where that is not possible or not found.

    Args:
        documents: at least one has an area.
        sizes: int64[P], tokens of each rank; they sum to those of ``documents``.
        most: the largest useful ratio of a rank's area to the mean, AS_EVEN or more.
    """
    tokens, area, total = documents.tokens, documents.area, int(sizes.sum())
    if len(tokens) < 2 * len(sizes) or total > MOST_TOKENS or tokens.max() > sizes.min():
        return None
    if least_area(documents, int(sizes.min())) > ROOM * most * area.sum() / len(sizes):
        return None
    units = np.rint(area * (AREA_UNITS / area.sum())).astype(np.int64)
    assigned = _Assignment(tokens, units, sizes)
    if not assigned.level():
        return None
    assigned.even_out()
    held = [assigned.rank_of, documents.bounds[:-1], documents.bounds[1:]]
    return np.stack(held, axis=1)[np.argsort(assigned.rank_of, kind="stable")]


class _Assignment:
    """The rank of each document: int64[n] tokens and areas, and int64[P] tokens of each rank."""

    def __init__(self, tokens: Ints, area: Ints, sizes: Ints) -> None:
        self.tokens, self.area, self.sizes = tokens, area, sizes
        middle = np.cumsum(tokens) - (tokens + 1) // 2
        self.rank_of = np.searchsorted(np.cumsum(sizes), middle, side="right")

    @property
    def loads(self) -> Ints:
        """Area on each rank."""
        return np.bincount(self.rank_of, self.area, minlength=len(self.sizes))

    def level(self) -> bool:
        """Give each rank in turn its number of tokens, and the rest to the next rank; returns
        whether a way was found."""
        ranks, mean = len(self.sizes), float(self.loads.mean())
        return all(self._exchange(rank, rank + 1, mean) for rank in range(ranks - 1))

    def even_out(self) -> None:
        """Even out areas between the rank with the most and others, those with the least first. The
        largest documents are exchanged first, then smaller ones, as long as that helps."""
        largest: list[float] = []
        for step in range(STEPS):
            loads, before = self.loads, self.rank_of.copy()
            largest.append(float(loads.max()))
            no_less = step > 1 and largest[-1] >= LESS * largest[-3]
            if no_less or largest[-1] <= AS_EVEN * loads.mean():
                return
            falling = np.argsort(-loads, kind="stable").tolist()
            heaviest, others = falling[0], falling[:0:-1][:TRIED]
            for other in others:
                self._exchange(heaviest, other, (loads[heaviest] + loads[other]) / 2, step)
                if self.loads[[heaviest, other]].max() < loads[heaviest]:
                    break
                self.rank_of = before.copy()

    def _exchange(self, rank: int, other: int, load: float, step: int = 0) -> bool:
        """Reassign documents of two ranks so that ``rank`` holds its number of tokens and, as
        nearly as possible, has the area ``load``; returns whether a way was found."""
        both = np.flatnonzero((self.rank_of == rank) | (self.rank_of == other))
        free = self._free(both, step)
        kept = np.setdiff1d(both, free)
        kept = kept[self.rank_of[kept] == rank]
        tokens = int(self.sizes[rank] - self.tokens[kept].sum())
        area = round(load) - int(self.area[kept].sum())
        halves = free[::2], free[1::2]
        # By tokens and then area on one number line, where the best fit is next to what is wanted;
        # sums with another number of tokens are half a stride away or more.
        stride = 4 * AREA_UNITS
        both0, both1 = (_sums(self.tokens[half] * stride + self.area[half]) for half in halves)
        wanted = tokens * stride + area - both0
        order = np.argsort(both1, kind="stable")
        have = both1[order]
        place = np.searchsorted(have, wanted)
        beside = np.stack([place - 1, place]).clip(0, len(have) - 1)
        found = order[beside]
        error = np.abs(have[beside] - wanted)
        error[error >= stride // 2] = stride
        side, first = np.unravel_index(int(error.argmin()), error.shape)
        if error[side, first] == stride:
            return False
        self.rank_of[free] = other
        for half, chosen in zip(halves, (int(first), int(found[side, first])), strict=True):
            self.rank_of[half[chosen >> np.arange(len(half)) & 1 == 1]] = rank
        return True

    def _free(self, documents: Ints, step: int) -> Ints:
        """Up to REASSIGNED documents: LARGEST with the most area, or from step to step with less,
        and a sample of all those below."""
        falling = documents[np.argsort(-self.area[documents], kind="stable")]
        if len(falling) <= REASSIGNED:
            return falling
        first = min(step * LARGEST, len(falling) - REASSIGNED)
        rest = np.linspace(first + LARGEST, len(falling) - 1, REASSIGNED - LARGEST).astype(np.int64)
        return np.concatenate([falling[first : first + LARGEST], falling[rest]])


def least_area(documents: DocumentAreas, tokens: int) -> float:
    """A lower bound on the largest area of a rank, however whole documents are assigned to ranks of
    ``tokens`` tokens: that of a document and of the least dense tokens that fill up its rank."""
    rising = np.argsort(documents.area / documents.tokens)
    held = np.append(0, np.cumsum(documents.tokens[rising]))
    attended = np.append(0.0, np.cumsum(documents.area[rising]))
    rest = np.interp(tokens - documents.tokens, held, attended)
    return float((documents.area + rest).max())


def _sums(values: Ints) -> Ints:
    """int64[2 ** n]: sums of all subsets; bit i of the index says whether value i is included."""
    sums = np.zeros(1 << len(values), dtype=np.int64)
    for n, value in enumerate(values.tolist()):
        np.add(sums[: 1 << n], value, out=sums[1 << n : 2 << n])
    return sums
