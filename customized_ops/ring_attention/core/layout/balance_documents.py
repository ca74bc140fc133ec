"""Assigning documents to ranks, whole where possible: then no key crosses a link for them, and each
rank attends all its documents in one call.

A document here is a stretch of tokens that attend nothing outside it, nor are attended from there.
As few as can be, the largest, are split: each rank holds a chunk from the front and its mirror
image from the end. The others start on ranks in sequence order. Two ranks at a time exchange some,
until each rank holds exactly its number of tokens and about the mean area.

What two ranks exchange is found by meeting in the middle (Horowitz and Sahni, 1974): all sums of
one half of some of their documents are looked up among all sums of the other half, so that every
way to assign FREE documents to two ranks is weighed, in the time of 2 ** (FREE / 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Floats, Ints
from ..mask.intervals import union
from ..mask.slices import K0, K1, Q0, Q1, Slices, areas, clip
from .layout_tables import even_bounds, front_and_end

Weighted = Sequence[tuple[Slices, float]]  # a mask and how much its area counts

# Documents of two ranks that are assigned anew at a time; those of the most area among them.
FREE, LARGE = 22, 8
# Steps to even out areas, and ranks that are tried in each.
STEPS, OTHERS = 12, 2
# Numbers of split documents that are tried, from the least that may do.
SPLITS = 4
# Where the largest area over the mean is no use to improve.
EVEN = 1.01
# Pairs of 32 heads that take as long as another kernel call and its merge do at the least (100 us
# on an H200): so much more on one rank is better than documents split.
CALL_PAIRS = 1 << 20
# Chunks of split documents of so many tokens end at multiples of a kernel's TILE.
LONG, TILE = 1024, 128
# Areas are counted in whole parts of all, tokens beside them: both fit an int64.
AREA_UNITS = 1 << 34
MOST_TOKENS = 1 << 25


def documents(slices: Slices, total: int) -> Ints:
    """int64[n + 1]: bounds of the shortest stretches that attend themselves only.

    Args:
        slices: normalised int64[m, 6] of a mask with ``total`` queries and ``total`` keys.
    """
    start = np.minimum(slices[:, Q0], slices[:, K0])
    last = np.maximum(slices[:, Q1], slices[:, K1]) - 1
    _, starts, lasts = union(np.zeros(len(slices), dtype=np.int64), start, last).T
    return np.unique(np.concatenate([[0], starts, lasts + 1, [total]]))


class DocumentAssignment(NamedTuple):
    """Documents on ranks: int64[n, 3] ranges of tokens (rank, start, stop), by rank, each rank's
    chunks of split documents first; the area of the rank with the most over the mean; and whether
    it is no use to look for a better assignment."""

    table: Ints
    imbalance: float
    good: bool


def assign_documents(weighted: Weighted, total: int, group_size: int) -> DocumentAssignment | None:
    """Documents assigned so that ranks hold as many tokens as if all were in order.

    Args:
        weighted: normalised slices of a mask over ``total`` tokens, and its weight, above 0.
    Returns:
        None where no such assignment is found, or where there are too few documents to try.
    """
    bounds = documents(np.concatenate([slices for slices, _ in weighted]), total)
    if group_size == 1 or len(bounds) <= 2 * group_size or total > MOST_TOKENS:
        return None
    area = np.zeros(len(bounds) - 1)
    for slices, weight in weighted:
        document = np.searchsorted(bounds, slices[:, Q0], side="right") - 1
        area += weight * np.bincount(document, areas(slices), minlength=len(area))
    if not area.any():
        return None
    falling = np.argsort(-area, kind="stable")
    sizes = np.diff(even_bounds(total, group_size))
    too_large = (area > EVEN * area.sum() / group_size) | (np.diff(bounds) > sizes.min())
    first = int(np.flatnonzero(too_large[falling])[-1]) + 1 if too_large.any() else 0
    best = None
    for splits in range(first, min(first + SPLITS, len(area))):
        found = _with_splits(weighted, bounds, area, np.sort(falling[:splits]), sizes)
        if found is not None and (best is None or found.imbalance < best.imbalance):
            best = found
            if best.good:
                break
    return best


def _with_splits(
    weighted: Weighted, bounds: Ints, area: Floats, split: Ints, sizes: Ints
) -> DocumentAssignment | None:
    """:func:`assign_documents` with these documents split."""
    chunks = _chunks(bounds[split], bounds[split + 1], len(sizes))
    rank, start, stop = chunks.T
    of_chunks = np.zeros(len(chunks))
    for slices, weight in weighted:
        parts = [clip(slices, *rows, 0, int(bounds[-1])) for rows in zip(start, stop, strict=True)]
        of_chunks += weight * np.array([areas(part).sum() for part in parts])
    unit = AREA_UNITS / area.sum()
    whole = np.setdiff1d(np.arange(len(area)), split)
    assigned = _Assignment(
        np.diff(bounds)[whole],
        np.rint(unit * area[whole]).astype(np.int64),
        sizes - np.bincount(rank, stop - start, minlength=len(sizes)).astype(np.int64),
        np.bincount(rank, np.rint(unit * of_chunks), minlength=len(sizes)).astype(np.float64),
    )
    if not assigned.level():
        return None
    assigned.even_out()
    held = np.stack([assigned.rank_of, bounds[whole], bounds[whole + 1]], axis=1)
    # Split documents first: their rows, which alone attend others' keys, lie side by side.
    table = np.concatenate([chunks[np.argsort(start, kind="stable")], held])
    imbalance = float(assigned.loads.max() / assigned.loads.mean())
    mean_pairs = area.sum() / (len(sizes) * sum(weight for _, weight in weighted))
    free = 0 if len(split) else CALL_PAIRS / mean_pairs
    in_order = np.argsort(table[:, 0], kind="stable")
    return DocumentAssignment(table[in_order], imbalance, imbalance <= max(EVEN, 1 + free))


def _chunks(start: Ints, stop: Ints, group_size: int) -> Ints:
    """int64[n, 3] ranges of split documents: rank, start, stop."""
    cuts = np.arange(2 * group_size + 1) * (stop - start)[:, None] // (2 * group_size)
    inner = cuts[:, 1:-1]
    inner -= np.where(inner[:, :1] >= LONG, inner % TILE, 0)
    return front_and_end(start[:, None] + cuts)


class _Assignment:
    """The rank of each whole document.

    Args:
        tokens, area: int64[n] of each document. sizes: int64[P], tokens of them that each rank must
            hold. base: float64[P], area that it has besides.
    """

    def __init__(self, tokens: Ints, area: Ints, sizes: Ints, base: Floats) -> None:
        self.tokens, self.area, self.sizes, self.base = tokens, area, sizes, base
        middle = np.cumsum(tokens) - (tokens + 1) // 2
        self.rank_of = np.searchsorted(np.cumsum(sizes), middle, side="right")

    @property
    def loads(self) -> Floats:
        """Area on each rank."""
        return self.base + np.bincount(self.rank_of, self.area, minlength=len(self.sizes))

    def level(self) -> bool:
        """Give each rank its number of tokens, one after the other, the rest to the next rank;
        whether there is a way."""
        ranks, mean = len(self.sizes), float(self.loads.mean())
        return bool((self.sizes >= 0).all()) and all(
            self._exchange(rank, rank + 1, mean) for rank in range(ranks - 1)
        )

    def even_out(self) -> None:
        """Even out areas between the rank with the most and others, those with the least first:
        with the largest documents to begin with, then with smaller ones."""
        for step in range(STEPS):
            loads, before = self.loads, self.rank_of.copy()
            if loads.max() <= EVEN * loads.mean():
                return
            falling = np.argsort(-loads, kind="stable").tolist()
            heaviest, others = falling[0], falling[:0:-1][:OTHERS]
            for other in others:
                self._exchange(heaviest, other, (loads[heaviest] + loads[other]) / 2, step)
                if self.loads[[heaviest, other]].max() < loads[heaviest]:
                    break
                self.rank_of = before.copy()

    def _exchange(self, rank: int, other: int, load: float, step: int = 0) -> bool:
        """Assign documents of two ranks anew so that ``rank`` holds its number of tokens and, as
        nearly as can be, has this load; whether there is a way."""
        both = np.flatnonzero((self.rank_of == rank) | (self.rank_of == other))
        free = self._free(both, step)
        kept = np.setdiff1d(both, free)
        kept = kept[self.rank_of[kept] == rank]
        tokens = int(self.sizes[rank] - self.tokens[kept].sum())
        area = round(load - self.base[rank]) - int(self.area[kept].sum())
        halves = free[::2], free[1::2]
        (tokens0, area0), (tokens1, area1) = (
            (_sums(self.tokens[half]), _sums(self.area[half])) for half in halves
        )
        # By tokens and then area on one number line, where the best fit is beside what is wanted.
        stride = 4 * AREA_UNITS
        order = np.argsort(tokens1 * stride + area1, kind="stable")
        have = (tokens1 * stride + area1)[order]
        place = np.searchsorted(have, (tokens - tokens0) * stride + area - area0)
        beside = np.stack([place - 1, place]).clip(0, len(have) - 1)
        found = order[beside]
        error = np.abs(area0 + area1[found] - area)
        error[tokens0 + tokens1[found] != tokens] = stride
        side, first = np.unravel_index(int(error.argmin()), error.shape)
        if error[side, first] == stride:
            return False
        self.rank_of[free] = other
        for half, chosen in zip(halves, (int(first), int(found[side, first])), strict=True):
            self.rank_of[half[chosen >> np.arange(len(half)) & 1 == 1]] = rank
        return True

    def _free(self, documents: Ints, step: int) -> Ints:
        """Up to FREE of ``documents``: at first those of the most area, from step to step those of
        less, and some of all lengths below."""
        falling = documents[np.argsort(-self.area[documents], kind="stable")]
        if len(falling) <= FREE:
            return falling
        first = min(step * LARGE, len(falling) - FREE)
        rest = np.linspace(first + LARGE, len(falling) - 1, FREE - LARGE).astype(np.int64)
        return np.concatenate([falling[first : first + LARGE], falling[rest]])


def _sums(values: Ints) -> Ints:
    """int64[2 ** n]: of all subsets; bit i of the index says whether value i is in."""
    sums = np.zeros(1, dtype=np.int64)
    for value in values.tolist():
        sums = np.concatenate([sums, sums + value])
    return sums
