"""Evening out an assignment of chunks where swaps of two chunks do not: splits of two ranks.

All that two ranks hold is split anew, as evenly as can be. That is repeated between the rank with
the most work and the others; where it helps no more, a few ranks are shuffled and it begins again
(iterated local search: Lourenco, Martin and Stutzle, 2003).
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..arrays import Ints

# Up to so many chunks on two ranks every split is weighed (24310 of 18), else exchanges of two.
ALL_SPLITS_CHUNKS = 18
# Bounds on effort: splits and exchanges weighed, and what looking at two ranks costs at least.
WEIGHED = 1 << 20
LEAST_WEIGHED = 256
# Ranks shuffled where splits help no more.
SHUFFLED_RANKS = 3


@lru_cache(maxsize=ALL_SPLITS_CHUNKS)
def _halves(count: int) -> npt.NDArray[np.int8]:
    """int8[splits, (count + 1) // 2]: who is with 0 when ``count`` are split in two.

    Halves are equal in number; of an odd count either half may be the larger by one, and -1 stands
    for nobody.
    """
    rest, half = range(1, count), (count + 1) // 2
    rows = [(0, *own) for own in itertools.combinations(rest, half - 1)]
    if count % 2 and half > 1:
        rows += [(0, *own, -1) for own in itertools.combinations(rest, half - 2)]
    return np.array(rows, dtype=np.int8)


class Splits:
    """An assignment under improvement.

    Attributes:
        work: int64[n + 1], of each chunk; the last is 0, so that -1 stands for no chunk.
        held: for each rank the chunks it holds.
        loads: int64[group_size], their work.
        left: splits and exchanges that may still be weighed.
    """

    def __init__(self, work: Ints, rank_of: Ints, group_size: int) -> None:
        self.work = np.append(work, 0)
        self.held = [np.flatnonzero(rank_of == rank) for rank in range(group_size)]
        self.loads = np.array([self.work[own].sum() for own in self.held])
        self.left = WEIGHED

    def level(self, enough: float) -> None:
        """Split the rank with the most work against the best other, while that lowers its load."""
        while self.loads.max() > enough and self.left > 0:
            heaviest = int(self.loads.argmax())
            found = [
                (*self._split(heaviest, rank), rank)
                for rank in range(len(self.held))
                if rank != heaviest
            ]
            larger, own, other, rank = min(found, key=lambda row: row[0])
            if larger >= self.loads[heaviest]:
                return
            self._give(heaviest, own)
            self._give(rank, other)

    def shuffle(self, draw: np.random.Generator) -> None:
        """Shuffle what the rank with the most work and some others hold."""
        heaviest = int(self.loads.argmax())
        others = np.delete(np.arange(len(self.held)), heaviest)
        ranks = [heaviest, *draw.permutation(others)[: SHUFFLED_RANKS - 1].tolist()]
        ends = np.cumsum([len(self.held[rank]) for rank in ranks])[:-1]
        chunks = draw.permutation(np.concatenate([self.held[rank] for rank in ranks]))
        for rank, own in zip(ranks, np.split(chunks, ends), strict=True):
            self._give(rank, own)

    def _give(self, rank: int, chunks: Ints) -> None:
        self.held[rank], self.loads[rank] = chunks, self.work[chunks].sum()

    def _split(self, a: int, b: int) -> tuple[int, Ints, Ints]:
        """The larger load of two ranks, and what each holds, after the best split found."""
        both = np.concatenate([self.held[a], self.held[b]])
        total = int(self.loads[a] + self.loads[b])
        if len(both) > ALL_SPLITS_CHUNKS:
            return self._exchange(a, b)
        splits = _halves(len(both))
        sums = np.append(self.work[both], 0)[splits].sum(axis=1)
        self.left -= LEAST_WEIGHED + len(splits)
        larger = np.maximum(sums, total - sums)
        best = splits[int(larger.argmin())]
        with_first = np.zeros(len(both), dtype=bool)
        with_first[best[best >= 0]] = True
        return int(larger.min()), both[with_first], both[~with_first]

    def _exchange(self, a: int, b: int) -> tuple[int, Ints, Ints]:
        """As :meth:`_split`, by the best exchange of two chunks for two."""
        own, other = self.held[a], self.held[b]
        i, j = np.triu_indices(len(own), 1)
        k, m = np.triu_indices(len(other), 1)
        given = self.work[own[i]] + self.work[own[j]]
        got = self.work[other[k]] + self.work[other[m]]
        order = np.argsort(got, kind="stable")
        self.left -= LEAST_WEIGHED + len(given) + len(got)
        # Half the difference should change sides: the sums on both sides of that are tried.
        wanted = given - (self.loads[a] - self.loads[b]) // 2
        at = np.searchsorted(got[order], wanted) + np.array([[-1], [0]])
        at = np.clip(at, 0, len(got) - 1)
        moved = given - got[order][at]
        larger = np.maximum(self.loads[a] - moved, self.loads[b] + moved)
        side, pair = divmod(int(larger.argmin()), len(given))
        back = order[at[side, pair]]
        going, coming = [i[pair], j[pair]], [k[back], m[back]]
        return (
            int(larger.min()),
            np.append(np.delete(own, going), other[coming]),
            np.append(np.delete(other, coming), own[going]),
        )


def even_out(work: Ints, rank_of: Ints, group_size: int, enough: float) -> Ints:
    """An assignment with a largest load of at most that of ``rank_of``, sought until ``enough``.

    Ranks that hold the same number of chunks, up to one, do so after.
    """
    splits = Splits(work, rank_of, group_size)
    draw = np.random.default_rng(0)  # the same on every rank
    best, least = rank_of, int(splits.loads.max())
    while True:
        splits.level(enough)
        if splits.loads.max() < least:
            least, best = int(splits.loads.max()), np.empty(len(work), dtype=np.int64)
            for rank, own in enumerate(splits.held):
                best[own] = rank
        if least <= enough or splits.left <= 0 or group_size == 2:
            return best
        splits.shuffle(draw)
