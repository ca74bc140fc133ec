"""Improving an assignment of chunks to ranks by swapping two of them at a time."""

from __future__ import annotations

import numpy as np

from ..arrays import Ints, Numbers

# Bounds on effort: pairs of chunks weighed in one step of levelling, and in one pass of gathering.
LEVEL_PAIRS = 1 << 16
GATHER_PAIRS = 1 << 21
# Stands for a swap that may not be made.
FORBIDDEN = 1 << 62


class Search:
    """An assignment that is improved by swapping two chunks at a time.

    Ranks that hold one chunk less than others get an empty one, so that giving a chunk away is a
    swap too; a rank never holds two empty ones. How well chunks are grouped is measured by the cut:
    the need between pairs of chunks on different ranks. The cut counts a key once for each chunk
    that needs it, not once for each rank, but its change by a swap takes four look-ups (Kernighan
    and Lin, 1970).
    """

    def __init__(self, work: Ints, need: Numbers, rank_of: Ints, group_size: int) -> None:
        self.n = len(work)
        short = np.flatnonzero(
            np.bincount(rank_of, minlength=group_size) < -(-self.n // group_size)
        )
        self.work = np.concatenate([work, np.zeros(len(short), dtype=np.int64)])
        self.rank_of = np.concatenate([rank_of, short])
        self.loads = loads_of(work, rank_of, group_size)
        self.has_empty = np.zeros(group_size, dtype=bool)
        self.has_empty[short] = True
        self.pair = np.zeros((len(self.work),) * 2, dtype=np.int32)
        self.pair[: self.n, : self.n] = need
        self.pair += self.pair.T.copy()
        np.fill_diagonal(self.pair, 0)
        # link[r, a]: need between chunk a and the chunks on rank r.
        self.link = np.stack(
            [self.pair[self.rank_of == rank].sum(axis=0) for rank in range(group_size)]
        )

    def level(self, cap: float) -> None:
        """Swap chunks of the rank with the most work until it has no more than ``cap``.

        Ends early if no swap helps. Each swap lowers the larger load of its two ranks. If some
        swaps get both loads down to ``cap``, the one with the least cut is made, else the one that
        levels best.
        """
        while self.loads.max() > cap:
            heaviest = int(self.loads.argmax())
            own = np.flatnonzero(self.rank_of == heaviest)
            others = np.flatnonzero(self.rank_of != heaviest)
            every = 1 + own.size * others.size // LEVEL_PAIRS
            swapped = self._level_once(own[::every], others, cap)
            if not swapped and (every == 1 or not self._level_once(own, others, cap)):
                return

    def _level_once(self, own: Ints, others: Ints, cap: float) -> bool:
        """Make the best swap between chunks of the heaviest rank and others, if one helps."""
        worst, cut = self._swaps(own, others)
        if worst.min() >= self.loads.max():
            return False
        cut = np.where(worst <= max(cap, worst.min()), cut, FORBIDDEN)
        a, c = divmod(int(cut.argmin()), len(others))
        self._swap(own[a], others[c])
        return True

    def gather(self, cap: float) -> None:
        """Swap chunks to lower the cut, lifting no rank above ``cap``.

        Takes the chunks in turn, and makes the best swap for each, until a round changes nothing.
        """
        rows, changed = GATHER_PAIRS // len(self.work), True
        while changed and rows > 0:
            changed = False
            gain = self.link.max(axis=0) - self.link[self.rank_of, np.arange(len(self.work))]
            # A swap that lowers the cut gains on one of its two chunks: begin where most is gained.
            order = np.argsort(-gain, kind="stable")[: np.count_nonzero(gain)][:rows]
            rows -= len(order)
            for a in order:
                others = np.flatnonzero(self.rank_of != self.rank_of[a])
                worst, cut = self._swaps(np.array([a]), others)
                before = np.maximum(self.loads[self.rank_of[a]], self.loads[self.rank_of[others]])
                cut = np.where(worst <= np.maximum(cap, before), cut, FORBIDDEN)[0]
                c = int(cut.argmin())
                if cut[c] < 0:
                    self._swap(a, others[c])
                    changed = True

    def _swaps(self, own: Ints, others: Ints) -> tuple[Ints, Ints]:
        """For swaps of one rank's chunks with others': the larger load after, the cut's change.

        Empty chunks among ``own`` need no special case: moving one lowers neither load nor cut.
        """
        r, s = self.rank_of[own[0]], self.rank_of[others]
        given = self.work[own][:, None] - self.work[others]
        worst = np.maximum(self.loads[r] - given, self.loads[s] + given)
        worst[:, (others >= self.n) & self.has_empty[r]] = FORBIDDEN
        leave = self.link[r][own][:, None] - self.link[:, own].T[:, s]
        arrive = self.link[s, others] - self.link[r, others]
        return worst, leave + arrive + 2 * self.pair[np.ix_(own, others)]

    def _swap(self, a: int, c: int) -> None:
        r, s = self.rank_of[a], self.rank_of[c]
        given = self.work[a] - self.work[c]
        self.loads[r] -= given
        self.loads[s] += given
        moved = self.pair[c] - self.pair[a]
        self.link[r] += moved
        self.link[s] -= moved
        self.rank_of[a], self.rank_of[c] = s, r
        if c >= self.n:
            self.has_empty[[r, s]] = self.has_empty[[s, r]]


def loads_of(work: Ints, rank_of: Ints, group_size: int) -> Ints:
    """int64[group_size]: the work of each rank's chunks."""
    loads = np.zeros(group_size, dtype=np.int64)
    np.add.at(loads, rank_of, work)
    return loads
