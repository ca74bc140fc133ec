"""Dealing chunks of a sequence to ranks: even work first, then little communication.

    areas, need = chunk_work(slices, total, chunk)    what each chunk computes, and with whose keys
    rank_of = deal(areas, need, tokens, group_size)   int64[n]: the rank that holds each chunk

Every rank deals alone and must come to the same deal. So areas are whole numbers, whose sums do
not depend on the order of adding; ties fall to the lower index; and effort is limited by counting
steps, never by a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .balance_swaps import Search
from .slices import K0, K1, Q0, Q1, Slices, normalise
from .slices import areas as areas_of

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.number]

# The need of the mask with the most weight; need is in whole numbers, as areas are.
NEED_UNITS = 64
# Imbalance that is left alone: a percent is below what kernels vary by.
TOLERANCE = 0.01
# The search begins with loads let loose by so much and ends within TOLERANCE.
SLACKS = (0.5, 0.2, 0.1, 0.05, TOLERANCE)
# Up to this many variables (chunks * ranks) a deal that is not yet even is solved exactly, ...
EXACT_VARIABLES = 400
# ... in at most so many branch-and-bound nodes.
EXACT_NODES = 300
# Pairs of slice and chunk worked on at a time.
BATCH_ROWS = 1 << 20


def chunk_work(slices: Slices, total: int, chunk: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
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
        touched = last[start:stop] - first[start:stop] + 1
        within = np.arange(touched.sum()) - np.repeat(np.cumsum(touched) - touched, touched)
        at = np.repeat(first[start:stop], touched) + within
        parts = np.repeat(slices[start:stop], touched, axis=0)
        parts[:, Q0] = np.maximum(parts[:, Q0], at * chunk)
        parts[:, Q1] = np.minimum(parts[:, Q1], (at + 1) * chunk)
        tight = normalise(parts)
        assert len(tight) == len(parts), "a nonempty row range of a normalised slice has keys"
        np.add.at(area, at, areas_of(tight))
        np.add.at(edges, (at, tight[:, K0] // chunk), 1)
        np.add.at(edges, (at, (tight[:, K1] - 1) // chunk + 1), -1)
        start = stop
    return area, np.cumsum(edges[:, :n], axis=1, dtype=np.int32) > 0


def imbalance(areas: Numbers, rank_of: Ints, group_size: int) -> float:
    """The largest rank's area over the mean; 1.0 when there is nothing to do."""
    loads = np.bincount(rank_of, weights=areas, minlength=group_size)
    return float(loads.max() * group_size / loads.sum()) if loads.any() else 1.0


def crossing(need: Numbers, tokens: Ints, rank_of: Ints, group_size: int) -> int:
    """Key tokens that cross ranks: a chunk counts once for each other rank that needs it.

    ``need[a, b]`` is 0 where chunk a's rows do without chunk b's keys; otherwise it weighs the
    crossing (1 for one mask), and of a rank's chunks the one with the largest weight counts.
    """
    crossed = 0
    for rank in range(group_size):
        own = rank_of == rank
        if own.any():
            crossed += int((need[own].max(axis=0) * tokens)[~own].sum())
    return crossed


def least_maximum(areas: Numbers, group_size: int) -> float:
    """A proven lower bound of the largest rank's area, when every rank holds n // P or more chunks.

    n chunks, P ranks, m = n // P; areas are not negative. The bound is the largest of

    - the mean: some rank has at least sum / P.
    - for every k with k * P < n: of the k * P + 1 largest chunks some rank holds k + 1 or more, as
      P ranks with k or fewer hold at most k * P. Those k + 1 weigh no less than the k + 1 smallest
      of the k * P + 1 largest. That rank holds at least m chunks, so max(0, m - k - 1) or more
      besides, which weigh no less than as many of the smallest chunks of all. (k = 0: the largest
      chunk and the m - 1 smallest.)

    Where areas are whole numbers, a rank's area is a multiple of their greatest common divisor, so
    the mean is rounded up to one.
    """
    values = np.asarray(areas)
    n = len(values)
    if not values.any():
        return 0.0
    bound = float(values.sum()) / group_size
    if values.dtype.kind in "iu":
        unit = int(np.gcd.reduce(values))
        bound = float(-(-int(values.sum()) // (group_size * unit)) * unit)
    falling = np.sort(values)[::-1]
    smallest = np.concatenate([[0], np.cumsum(falling[::-1])])
    for k in range((n - 1) // group_size + 1):
        together = falling[k * (group_size - 1) : k * group_size + 1].sum()
        bound = max(bound, float(together + smallest[max(0, n // group_size - k - 1)]))
    return bound


def deal_masks(
    weighted: Sequence[tuple[Slices, float]], total: int, chunk: int, group_size: int
) -> Ints:
    """:func:`deal` for the weighted sum of masks' work; int64[n] ranks of chunks of the sequence.

    Args:
        weighted: normalised slices of a mask over ``total`` tokens, and its weight, above 0.
        chunk: tokens per chunk; the last chunk may be shorter.
    """
    heaviest = max(weight for _, weight in weighted)
    n = -(-total // chunk)
    areas, need = np.zeros(n), np.zeros((n, n), dtype=np.int32)
    for slices, weight in weighted:
        own_areas, own_need = chunk_work(slices, total, chunk)
        areas += weight / heaviest * own_areas
        need += max(1, round(NEED_UNITS * weight / heaviest)) * own_need
    return deal(areas, need, np.minimum(chunk, total - chunk * np.arange(n)), group_size)


def deal(areas: Numbers, need: Numbers, tokens: Ints, group_size: int) -> Ints:
    """The rank of each chunk.

    - Every rank holds the same number of chunks, up to one.
    - The largest rank's area is within TOLERANCE of the mean if swapping chunks gets there. If not,
      small deals (EXACT_VARIABLES) are solved to the optimum, within EXACT_NODES.
    - Among such deals one is sought that moves few keys.

    Two deals are begun, in sequence order (keeps neighbours together, so it suits windows and
    documents) and largest chunk first (even from the start); the better one is returned.

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
    enough = max((1 + TOLERANCE) * mean, least_maximum(work, group_size))

    def score(search: Search) -> tuple[float, int]:
        crossed = crossing(need, tokens, search.rank_of[:n], group_size)
        return max(enough, float(search.loads.max())), crossed

    searches = []
    for begun in (np.arange(n) * group_size // n, _largest_first(work, group_size)):
        search = Search(work, need, begun, group_size)
        for slack in SLACKS:
            search.level(max(enough, (1 + slack) * mean))
            search.gather(max(enough, (1 + slack) * mean))
        searches.append(search)
    best = min(searches, key=score)
    if best.loads.max() > enough and n * group_size <= EXACT_VARIABLES:
        exact = Search(work, need, _exact(work, best.rank_of[:n], group_size), group_size)
        exact.gather(max(enough, float(exact.loads.max())))
        best = min(best, exact, key=score)
    # Ranks are alike: number them by their first chunk.
    first = np.unique(best.rank_of[:n], return_index=True)[1]
    return np.argsort(np.argsort(first))[best.rank_of[:n]]


def _whole(areas: Numbers) -> Ints:
    """Areas as whole numbers; fractions are scaled so far up that rounding does not matter."""
    values = np.asarray(areas)
    if (values == np.rint(values)).all():
        return values.astype(np.int64)
    return np.rint(values * (2.0**40 / values.max())).astype(np.int64)


def _largest_first(work: Ints, group_size: int) -> Ints:
    """Each chunk, the largest first, to the rank with the least work that has room."""
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


def _exact(work: Ints, rank_of: Ints, group_size: int) -> Ints:
    """The deal with the least largest load, or the best one found in EXACT_NODES; else ``rank_of``.

    A mixed-integer program: x[i, r] says that rank r holds the i-th largest chunk, and the largest
    load m is minimised. Ranks are alike, so the i-th largest chunk goes to one of the first i.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, hstack, kron

    n = len(work)
    order = np.argsort(-work, kind="stable")
    size = work[order] / work.max()
    # Columns are x[0, 0], x[0, 1], ..., x[n - 1, P - 1], m.
    no_m = csr_array((n, 1)), csr_array((group_size, 1))
    per_chunk = hstack([kron(eye_array(n), np.ones((1, group_size))), no_m[0]])
    per_rank = hstack([kron(np.ones((1, n)), eye_array(group_size)), no_m[1]])
    over_m = hstack([kron(size[None], eye_array(group_size)), -np.ones((group_size, 1))])
    allowed = np.arange(group_size)[None, :] <= np.arange(n)[:, None]
    least = least_maximum(work, group_size) / work.max()
    objective = np.append(np.zeros(n * group_size), 1)
    solved = milp(
        objective,
        integrality=1 - objective,
        bounds=Bounds(objective * least, np.append(allowed.reshape(-1), np.inf)),
        constraints=[
            LinearConstraint(per_chunk, 1, 1),
            LinearConstraint(per_rank, n // group_size, -(-n // group_size)),
            LinearConstraint(over_m, -np.inf, 0),
        ],
        options={"node_limit": EXACT_NODES, "mip_rel_gap": 0},
    )
    if solved.x is None:
        return rank_of
    found = np.zeros(n, dtype=np.int64)
    found[order] = solved.x[:-1].reshape(n, group_size).argmax(axis=1)
    return found
