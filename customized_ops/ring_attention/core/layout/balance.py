"""Assigning chunks of a sequence to ranks: even work first, then little communication.

    areas, need = chunk_work(slices, total, chunk)    what each chunk computes, and with whose keys
    rank_of = assign(areas, need, tokens, group_size)   int64[n]: the rank that holds each chunk

Every rank does this on its own, and all must come to the same assignment. So areas are whole
numbers, whose sums do not depend on the order of addition; ties go to the lower index; and effort
is limited by counting steps, never by a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Bools, Ints, Numbers, columns
from ..mask.intervals import spread
from ..mask.slices import K0, K1, Q0, Q1, Slices, clip_each
from ..mask.slices import areas as areas_of
from .balance_swaps import Search, loads_of

# What the mask with the most weight adds to a need; needs are whole numbers, as areas are.
NEED_UNITS = 64
# Imbalance that is left as it is: one percent is less than kernels vary by.
CHUNK_TOLERANCE = 0.01
# The same where chunks are assigned to hosts and then to ranks.
HOSTS_TOLERANCE = 0.03
# The search lets loads exceed the mean by these fractions in turn, at last by CHUNK_TOLERANCE.
SLACKS = (0.5, 0.2, 0.1, 0.05, CHUNK_TOLERANCE)
# Zigzag is tried where a rank has at least this many chunks: with fewer it has no long runs.
ZIGZAG_CHUNKS = 8
# Pairs (slice, chunk) that are processed at a time.
BATCH_ROWS = 1 << 20


def chunk_work(slices: Slices, total: int, chunk: int) -> tuple[Ints, Bools]:
    """The work of each chunk of query rows, and the chunks of keys that it needs.

    Args:
        slices: normalised int64[m, 6] of a mask with ``total`` queries and ``total`` keys.
        chunk: tokens per chunk; the last chunk may be shorter.
    Returns:
        int64[n], attended pairs in chunk a's rows; bool[n, n], whether they attend chunk b's keys.
    """
    n = -(-total // chunk)
    area = np.zeros(n, dtype=np.int64)
    # Row a counts the key ranges that begin minus those that ended before chunk b.
    edges = np.zeros((n, n + 1), dtype=np.int32)
    first, last = slices[:, Q0] // chunk, (slices[:, Q1] - 1) // chunk
    rows_before = np.concatenate([[0], np.cumsum(last - first + 1)])
    start = 0
    while start < len(slices):
        stop = int(np.searchsorted(rows_before, rows_before[start] + BATCH_ROWS, side="right")) - 1
        stop = max(stop, start + 1)
        x, at = spread(first[start:stop], last[start:stop] + 1)
        rows = columns(at, at + 1) * chunk
        parts = clip_each(slices[start + x], rows, Q0)
        np.add.at(area, at, areas_of(parts))
        np.add.at(edges, (at, parts[:, K0] // chunk), 1)
        np.add.at(edges, (at, (parts[:, K1] - 1) // chunk + 1), -1)
        start = stop
    return area, np.cumsum(edges[:, :n], axis=1, dtype=np.int32) > 0


def crossing(need: Numbers, tokens: Ints, rank_of: Ints, group_size: int) -> int:
    """Key tokens that cross ranks: a chunk counts once for each other rank that needs it.

    ``need[a, b]`` is 0 where chunk a's rows do without chunk b's keys; otherwise it is the weight
    of the crossing (1 for one mask). Where several of a rank's chunks need chunk b, the largest
    weight counts.
    """
    crossed = 0
    for rank in range(group_size):
        own = rank_of == rank
        if own.any():
            crossed += int((need[own].max(axis=0) * tokens)[~own].sum())
    return crossed


def least_maximum(areas: Ints, group_size: int) -> float:
    """A proven lower bound on the largest rank's area, when every rank holds n // P or more chunks.

    n chunks, P ranks, m = n // P; areas are not negative. The bound is the largest of

    - the mean, sum / P, rounded up to a multiple of the areas' greatest common divisor, as a rank's
      area is one.
    - for every k with k * P < n: of the k * P + 1 largest chunks some rank holds k + 1 or more, as
      P ranks with k or fewer hold at most k * P. Those k + 1 weigh no less than the k + 1 smallest
      of the k * P + 1 largest. That rank holds at least m chunks, so max(0, m - k - 1) or more
      besides, which weigh no less than as many of the smallest chunks of all. (k = 0: the largest
      chunk and the m - 1 smallest.)
    """
    n = len(areas)
    if not areas.any():
        return 0.0
    unit = int(np.gcd.reduce(areas))
    bound = float(-(-int(areas.sum()) // (group_size * unit)) * unit)
    falling = np.sort(areas)[::-1]
    smallest = np.concatenate([[0], np.cumsum(falling[::-1])])
    for k in range((n - 1) // group_size + 1):
        together = falling[k * (group_size - 1) : k * group_size + 1].sum()
        bound = max(bound, float(together + smallest[max(0, n // group_size - k - 1)]))
    return bound


@dataclass(frozen=True)
class Certificate:
    """How even an assignment is, and how even one can be.

    Attributes:
        largest: area of the rank with the most.
        mean: mean area over the ranks.
        least: a proven bound: no assignment with equal counts of chunks has a smaller ``largest``.
        within_one_percent: whether ``largest`` is at most 1.01 * ``mean``.
        proven_best: whether ``largest`` is ``least``. If not, the assignment may still be the best,
            without proof.
    """

    largest: float
    mean: float
    least: float
    within_one_percent: bool
    proven_best: bool

    @property
    def imbalance(self) -> float:
        """The largest rank's area over the mean; 1.0 where there is nothing to do."""
        return self.largest / self.mean if self.mean else 1.0

    @property
    def good(self) -> bool:
        """Whether there is no point in looking for a more even assignment."""
        return self.within_one_percent or self.proven_best

    def warning(self, chunk: int) -> str:
        """The warning of :meth:`Layout.balanced` for an assignment that may not be the best."""
        return (
            f"Layout.balanced: the rank with the most work computes {self.largest:.6g} pairs, "
            f"{self.imbalance - 1:.1%} above the mean of {self.mean:.6g}; equal numbers of chunks "
            f"of {chunk} tokens need at least {self.least:.6g}. A smaller chunk= evens out better"
        )


def certify(areas: Numbers, rank_of: Ints, group_size: int) -> Certificate:
    """What is known about an assignment of chunks with these areas.

    Args:
        areas: number[n], 0 or more. rank_of: int64[n], as :func:`assign` returns it.
    """
    work = _whole(areas)
    unit = float(np.sum(areas)) / int(work.sum()) if work.any() else 1.0
    largest, mean = int(loads_of(work, rank_of, group_size).max()), int(work.sum()) / group_size
    least = least_maximum(work, group_size)
    return Certificate(
        largest=largest * unit,
        mean=mean * unit,
        least=least * unit,
        within_one_percent=largest <= (1 + CHUNK_TOLERANCE) * mean,
        proven_best=largest <= least,
    )


def assign_masks(
    weighted: Sequence[tuple[Slices, float]],
    total: int,
    chunk: int,
    group_size: int,
    hosts: int = 1,
) -> tuple[Ints, Certificate]:
    """:func:`assign` for the weighted sum of the masks' work.

    Chunks are assigned to hosts first and then to the ranks of each, so that few keys cross between
    hosts, if the result is within HOSTS_TOLERANCE of the mean; else to all ranks at once.

    Args:
        weighted: normalised slices of a mask over ``total`` tokens, and its weight, above 0.
        chunk: tokens per chunk; the last chunk may be shorter.
        hosts: number of hosts, all with the same number of ranks.
    Returns:
        int64[n], the rank of each chunk of the sequence; and how even that is.
    """
    heaviest = max(weight for _, weight in weighted)
    n = -(-total // chunk)
    areas, need = np.zeros(n), np.zeros((n, n), dtype=np.int32)
    for slices, weight in weighted:
        own_areas, own_need = chunk_work(slices, total, chunk)
        areas += weight / heaviest * own_areas
        need += max(1, round(NEED_UNITS * weight / heaviest)) * own_need
    tokens = np.minimum(chunk, total - chunk * np.arange(n))
    if hosts > 1:
        host_of, ranks = assign(areas, need, tokens, hosts), group_size // hosts
        rank_of = host_of * ranks
        for host in range(hosts):
            (own,) = (host_of == host).nonzero()
            rank_of[own] += assign(areas[own], need[np.ix_(own, own)], tokens[own], ranks)
        certificate = certify(areas, rank_of, group_size)
        if certificate.imbalance <= 1 + HOSTS_TOLERANCE:
            return rank_of, certificate
    rank_of = assign(areas, need, tokens, group_size)
    return rank_of, certify(areas, rank_of, group_size)


def assign(areas: Numbers, need: Numbers, tokens: Ints, group_size: int) -> Ints:
    """The rank of each chunk.

    - Every rank holds the same number of chunks, up to one.
    - The largest rank's area is within CHUNK_TOLERANCE of the mean if swapping chunks gets there.
      :func:`certify` says how good an assignment is.
    - Among such assignments, the search looks for one that moves few keys.

    The search starts from two assignments: in sequence order (keeps neighbours together, so it
    suits windows and documents) and largest chunk first (even from the start). The better result is
    returned, or zigzag where that is better than both: its runs of chunks are long, which suits a
    causal mask best.

    Args:
        areas: number[n], 0 or more: the work in each chunk's rows.
        need: bool or integer[n, n], see :func:`crossing`.
        tokens: int64[n], tokens per chunk.
    Returns:
        int64[n] in 0..group_size-1.
    """
    n = len(areas)
    if n <= group_size:
        return np.arange(n, dtype=np.int64)
    work = _whole(areas)
    mean = int(work.sum()) / group_size
    enough = max((1 + CHUNK_TOLERANCE) * mean, least_maximum(work, group_size))

    def score(search: Search) -> tuple[float, int]:
        crossed = crossing(need, tokens, search.rank_of[:n], group_size)
        return max(enough, float(search.loads.max())), crossed

    def improved(begun: Ints, slacks: Sequence[float]) -> Search:
        search = Search(work, need, begun, group_size)
        for slack in slacks:
            search.level(max(enough, (1 + slack) * mean))
            search.gather(max(enough, (1 + slack) * mean))
        return search

    in_order, largest_first = np.arange(n) * group_size // n, _largest_first(work, group_size)
    searches = [improved(begun, SLACKS) for begun in (in_order, largest_first)]
    if n % (2 * group_size) == 0 and n >= ZIGZAG_CHUNKS * group_size:
        part = np.arange(n) * 2 * group_size // n
        zigzag = np.minimum(part, 2 * group_size - 1 - part)
        searches.append(Search(work, need, zigzag, group_size))
    best = min(searches, key=score)
    if best.loads.max() > enough:  # gathering keys may leave loads that no swap evens out
        best = min(best, improved(largest_first, SLACKS[-1:]), key=score)
    # All numberings of the ranks are equally good: number them by their first chunk.
    first = np.unique(best.rank_of[:n], return_index=True)[1]
    return np.argsort(np.argsort(first))[best.rank_of[:n]]


def _whole(areas: Numbers) -> Ints:
    """Areas as whole numbers; fractions are scaled up so far that rounding does not matter."""
    values = np.asarray(areas)
    if (values == np.rint(values)).all():
        return values.astype(np.int64)
    return np.rint(values * (2.0**40 / values.max())).astype(np.int64)


def _largest_first(work: Ints, group_size: int) -> Ints:
    """Assign each chunk, the largest first, to the rank with the least work that has room."""
    n = len(work)
    room = [(n + group_size - 1 - rank) // group_size for rank in range(group_size)]
    ranks = [(0, rank) for rank in range(group_size)]
    rank_of = np.zeros(n, dtype=np.int64)
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(ranks)
        rank_of[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(ranks, (load + int(work[chunk]), rank))
    return rank_of
