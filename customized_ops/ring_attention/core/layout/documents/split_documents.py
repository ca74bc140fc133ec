"""Packed documents on ranks by construction: even work at given numbers of tokens, in about the
time of a sort.

A token of a long document attends more keys than one of a short document: the document is denser.
A rank must hold ``sizes[rank]`` tokens and the mean area, so it is filled from two sides, as a slot
of the alias method is (Walker, 1977):

1. Documents denser than the mean, the largest first, go whole to the rank with the least area, as
   long as they fit there.
2. Those that do not fit form a line, the densest first. Each rank will take a stretch of it, so the
   density of the tokens that it will take is known.
3. The other documents, the longest first, go whole to the rank with the most room. Its room is what
   is left of its tokens once it has taken from the line what its area lacks. A document that fits
   nowhere is split.
4. Each rank takes as many tokens from the line as it lacks. So token counts are exact, and areas
   are as even as the density in step 2 was accurate. Steps 3 and 4 are repeated with the density of
   stretches whose areas are what ranks still lacked, and if need be with the density that was
   taken.

A document on the line is on consecutive ranks, as few as possible, so that few keys cross ranks.
Where its area is uneven, a stretch is taken from both of its ends: tokens are counted first, last,
second, last but one, ..., so that each stretch has the same density.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from ...arrays import Floats, Ints, columns
from .document_areas import DocumentAreas

# The largest area over the mean: EVEN is below what kernels vary by, and up to ACCEPTED a result is
# accepted rather than begun anew.
EVEN, ACCEPTED = 1.02, 1.03
# A document fits where it leaves a rank's area within this times the mean. These are tried in turn:
# if the result is not even, fewer documents stay whole.
FITS = (1.01, 0.95, 0.8, 0.0)
# Excess area that a rank may get from a document that is not split, as a fraction of the mean.
OVER = 0.01
# A document is not split for fewer tokens than this.
LEAST_PART = 64
# How many times densities are estimated.
DENSITY_ROUNDS = 8

INFINITE, TINY = float("inf"), 1e-9

Run = tuple[int, int, int, int]  # rank, document, and its tokens from first to last, as counted
Waiting = tuple[int, int, int, float]  # tokens left of a document, document, first of them, density


@dataclass
class _Ranks:
    """What ranks hold so far."""

    room: list[int]  # tokens that a rank lacks
    area: list[float]
    runs: list[Run] = field(default_factory=list)

    def take(self, rank: int, document: int, first: int, tokens: int, density: float) -> None:
        self.room[rank] -= tokens
        self.area[rank] += tokens * density
        self.runs.append((rank, document, first, first + tokens))

    def copy(self) -> _Ranks:
        return _Ranks(self.room.copy(), self.area.copy(), self.runs.copy())


def split_documents(documents: DocumentAreas, sizes: Ints) -> Ints:
    """int64[n, 3] token ranges (rank, start, stop) that give each rank ``sizes[rank]`` tokens and
    about the mean area.

    Args:
        documents: at least one has an area.
        sizes: int64[P], tokens of each rank; they sum to those of ``documents``.
    """
    tokens, area = documents.tokens, documents.area
    density = area / tokens
    mean = float(area.sum()) / np.count_nonzero(sizes)
    is_dense = density >= (1 - 1e-9) * area.sum() / tokens.sum()
    (sparse,) = (~is_dense).nonzero()
    sparse = sparse[np.argsort(tokens[sparse], kind="stable")]
    sparse_density = float(area[sparse].sum()) / max(int(tokens[sparse].sum()), 1)
    each = tokens[sparse].tolist(), sparse.tolist(), [0] * len(sparse), density[sparse].tolist()
    waiting = list(zip(*each, strict=True))  # the longest last
    best = _Ranks(sizes.tolist(), [np.inf] * len(sizes))
    for fits in FITS:
        ranks = _Ranks(sizes.tolist(), [0.0] * len(sizes))
        line = _place_dense(ranks, is_dense.nonzero()[0], documents, mean * fits, sparse_density)
        line = line[np.argsort(-density[line], kind="stable")]
        ends = np.cumsum([tokens[line], area[line]], axis=1)  # of documents on the line
        held = np.array(ranks.area) + sparse_density * np.array(ranks.room)
        lacking = np.maximum(mean - held, 0.0) * (sizes > 0)
        in_order = np.argsort(-lacking, kind="stable")
        of_line = np.full(len(sizes), np.inf)
        of_line[in_order] = sparse_density + _expected(
            lacking[in_order], ends[0], ends[1] - sparse_density * ends[0]
        )
        largest: list[float] = []
        for n in range(DENSITY_ROUNDS):
            filled = ranks.copy()
            _place_sparse(filled, waiting.copy(), of_line, mean)
            lacks = np.where(lacking > 0, np.maximum(mean - np.array(filled.area), 0.0), 0.0)
            found = _cut_line(filled, line, tokens, density, in_order)
            largest.append(max(filled.area))
            if largest[-1] < max(best.area):
                best = filled
            if largest[-1] <= EVEN * mean or largest[-3:] == 3 * largest[-1:]:
                break
            if n % 3:  # neither way converges everywhere
                of_line = found
            else:
                of_line[in_order] = _expected(lacks[in_order], *ends)
        if max(best.area) <= ACCEPTED * mean:
            break
    return _ranges(best.runs, documents)


def _place_dense(
    ranks: _Ranks, dense: Ints, documents: DocumentAreas, most: float, sparse_density: float
) -> Ints:
    """Step 1, with areas up to ``most`` per rank; returns the documents that did not fit. Room that
    is left is counted as if filled at ``sparse_density``."""
    tokens, area = documents.tokens, documents.area
    line = []
    least = [(sparse_density * room, rank) for rank, room in enumerate(ranks.room)]
    heapq.heapify(least)
    for document in dense[np.argsort(-area[dense], kind="stable")].tolist():
        held, rank = least[0]
        length, own = int(tokens[document]), float(area[document])
        held += own - sparse_density * length
        if held > most or length > ranks.room[rank]:
            line.append(document)
            continue
        heapq.heapreplace(least, (held, rank))
        ranks.take(rank, document, 0, length, own / length)
    return np.array(line, dtype=np.int64)


def _expected(lacking: Floats, tokens: Floats, area: Floats) -> Floats:
    """Step 2: the density of stretches of the line with areas in proportion to ``lacking``;
    infinite where a rank lacks nothing.

    Args:
        tokens, area: float64[n], those of the line up to the end of each of its documents.
    """
    stretches = lacking.cumsum()
    if len(tokens) == 0 or stretches[-1] <= 0:
        return np.full(len(lacking), np.inf)
    stretches *= area[-1] / stretches[-1]
    at = np.interp(stretches, np.append(0.0, area), np.append(0.0, tokens))
    stretches[1:], at[1:] = stretches[1:] - stretches[:-1], at[1:] - at[:-1]
    density = stretches / np.maximum(at, TINY)
    return np.where(density > 0, density, np.inf)


def _place_sparse(ranks: _Ranks, waiting: list[Waiting], of_line: Floats, mean: float) -> None:
    """Step 3, where ``of_line`` is the density of the tokens that each rank will take from the
    line. ``waiting``, with the longest document last, is emptied."""
    room, area, runs = ranks.room, ranks.area, ranks.runs
    # Tokens of the line per unit of area, and how many are too many; without a line 0 and infinite.
    of_area = 1 / of_line
    too_many = np.where(of_area > 0, OVER * mean * of_area, np.inf).tolist()
    # Negative values are room.
    lacking = np.maximum(mean - np.array(area), 0.0) * of_area - np.array(room)
    least = list(zip(lacking.tolist(), range(len(room)), strict=True))
    heapq.heapify(least)
    spared = of_area.tolist()
    while waiting:
        length, document, first, own = waiting.pop()
        lacks, rank = least[0]
        cost = 1 - own * spared[rank]  # room that a token takes, less what it spares of the line
        part = length
        if part * cost + lacks > too_many[rank] and -lacks >= LEAST_PART * cost:
            part = int(-lacks / cost)
        if part > room[rank]:
            part = room[rank]
        if part < length:
            insort(waiting, (length - part, document, first + part, own))
        if part == 0:  # the rank is full, though it may lack area: never look at it again
            heapq.heapreplace(least, (INFINITE, rank))
            continue
        room[rank] -= part
        area[rank] += part * own
        runs.append((rank, document, first, first + part))
        heapq.heapreplace(least, (lacks + part * cost, rank))


def _cut_line(ranks: _Ranks, line: Ints, tokens: Ints, density: Floats, in_order: Ints) -> Floats:
    """Step 4; returns the density of what each rank took, infinite where it took nothing."""
    had, room = np.array(ranks.area), np.array(ranks.room)
    left = list(zip(line.tolist(), tokens[line].tolist(), density[line].tolist(), strict=True))
    left.reverse()
    first = 0
    for rank in in_order.tolist():
        while ranks.room[rank] > 0 and left:
            document, length, dense = left[-1]
            part = min(ranks.room[rank], length - first)
            ranks.take(rank, document, first, part, dense)
            first += part
            if first == length:
                left.pop()
                first = 0
    taken = room - np.array(ranks.room)
    return np.where(taken > 0, (np.array(ranks.area) - had) / np.maximum(taken, 1), INFINITE)


def _ranges(runs: list[Run], documents: DocumentAreas) -> Ints:
    """Token ranges of ``runs``. Each rank's parts of split documents come first, as only they
    attend keys of other ranks, then its whole documents, both in the order of the sequence."""
    rank, document, first, last = np.array(list(zip(*runs, strict=True)), dtype=np.int64)
    start, stop = documents.bounds[document], documents.bounds[document + 1]
    is_part = last - first < stop - start
    both_ends = is_part & documents.uneven[document]
    front = np.where(both_ends, np.array([first + 1, last + 1]) // 2, [first, last])
    from_front = columns(rank, start + front[0], start + front[1], ~is_part)
    from_end = columns(rank, stop - last // 2, stop - first // 2, ~is_part)
    ranges = np.concatenate([from_front, from_end[both_ends]])
    ranges = ranges[ranges[:, 1] < ranges[:, 2]]
    return ranges[np.lexsort((ranges[:, 1], ranges[:, 3], ranges[:, 0]))][:, :3]
