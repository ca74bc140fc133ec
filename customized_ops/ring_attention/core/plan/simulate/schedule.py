"""In which order the ranks of a plan ask for, attend and send home what they do in a pass.

This is the executor (``core/run/rank_pass.py``, ``forward_pass.py``, ``backward_pass.py``) without
tensors: the same exchanges, kernel calls and waits in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...arrays import Floats, Ints
from ..plan_value import PlanValue
from ..token_bytes import TokenBytes
from .counts import OWN, REMOTE, Counts, KeyStep, Sent
from .ranks import Arrival, Ranks
from .timeline import PassTimeline


@dataclass(frozen=True)
class PassWork:
    """What a pass takes on each rank, float64[P].

    Attributes:
        pair_seconds: of kernels, for a pair of the rank's heads.
        token_bytes: of what moves.
        merge_bytes: read and written to merge a row's results with those that it has, or to add
            gradients of q.
        beside_bytes: to set a row's results of a group of heads beside the others'.
        add: read and written for each byte that comes home.
    """

    pair_seconds: Floats
    token_bytes: TokenBytes
    merge_bytes: Floats
    beside_bytes: Floats
    add: float


class Schedule:
    """A forward, or a backward, of all ranks; ``groups``: of heads, in which keys arrive."""

    def __init__(
        self, plan: PlanValue, counts: Counts, groups: int, work: PassWork, ranks: Ranks
    ) -> None:
        self._plan, self._counts, self._work, self._ranks = plan, counts, work, ranks
        self._groups = [1 if step is None else groups for step in counts.keys]
        received = [(n, step) for n, step in enumerate(counts.keys) if step is not None]
        self._waiting = deque(each for each in received for _ in range(groups))
        self._coming: deque[Fetch] = deque()
        self._homes: deque[Home] = deque()
        self._had = np.zeros((2, plan.group_size), dtype=bool)  # results of own, of received rows

    def run(self) -> PassTimeline:
        """Carry it out."""
        ranks, keys, rows = self._ranks, self._counts.keys, KeyStep(self._counts.rows)
        asked = Fetch(ranks, "rows", 0, rows, self._work.token_bytes.row_out)
        for _ in range(len(self._waiting) if ranks.one_sided else 1 + self._plan.relays):
            self._ask()
        if keys[0] is None:
            ranks.begin_local(self._seconds(0, OWN))
            self._had[OWN] = self._counts.pairs[0, OWN] > 0
        asked.wait()
        for n in range(len(keys)):
            self._attend_stage(n)
            if self._plan.rows_move and n + 1 == self._plan.remote_stages:
                self._send_home("results", n, rows, self._work.token_bytes.row_back)
        ranks.join()
        while self._homes:
            self._homes.popleft().wait()
        return ranks.end()

    def _ask(self) -> None:
        if self._waiting:
            n, step = self._waiting.popleft()
            nbytes = self._work.token_bytes.key_out / self._groups[n]
            self._coming.append(Fetch(self._ranks, "keys", n, step, nbytes))

    def _attend_stage(self, n: int) -> None:
        step, back = self._counts.keys[n], self._work.token_bytes.key_back
        for _ in range(self._groups[n]):
            if step is not None:
                self._take_keys()
                self._ranks.attend("own", n, self._seconds(n, OWN))
            self._ranks.attend("remote", n, self._seconds(n, REMOTE))
            if step is not None and back.any():
                self._send_home("gradients", n, step, back / self._groups[n])
                if self._plan.arrivals is not None:
                    self._end_older_homes()
        for whose in (OWN, REMOTE) if step is not None else (REMOTE,):
            self._merge(n, whose)

    def _take_keys(self) -> None:
        here = self._coming.popleft()
        self._ask()
        for each in (here, *list(self._coming)[:1]):
            each.go_on()
        here.wait()

    def _merge(self, n: int, whose: int) -> None:
        """What a stage makes of some rows is added to what there is of them."""
        some, rows = self._counts.pairs[n, whose] > 0, self._counts.hulls[n, whose]
        beside = self._work.beside_bytes * (self._groups[n] > 1) * some
        merged = self._work.merge_bytes * (some & self._had[whose])
        self._ranks.move_memory(n, rows * (beside + merged))
        self._had[whose] |= some

    def _send_home(self, what: str, n: int, step: KeyStep, nbytes: Ints | Floats) -> None:
        self._homes.append(Home(self._ranks, what, n, step, nbytes, self._work.add))

    def _end_older_homes(self) -> None:
        if len(self._homes) > 1:
            self._homes[-2].go_on()
        while len(self._homes) > 2:
            self._homes.popleft().wait()

    def _seconds(self, n: int, whose: int) -> Floats:
        """Of a kernel call."""
        return self._counts.pairs[n, whose] * self._work.pair_seconds / self._groups[n]


class Fetch:
    """Rows or keys on their way to who attends them; ``nbytes``: number[P], of a token there."""

    def __init__(
        self, ranks: Ranks, what: str, n: int, step: KeyStep, nbytes: Ints | Floats
    ) -> None:
        self._ranks, self._given = ranks, (what, n)
        self._arrivals = [ranks.send(what, n, step.straight.out(nbytes))]
        self._cross = ranks.send(what, n, step.cross.out(nbytes))
        self._spread: Sent | None = step.spread.out(nbytes)

    def go_on(self) -> None:
        """Wait for what crosses, and send it on inside the host."""
        if self._spread is not None:
            self._ranks.wait(self._given[1], self._cross)
            self._arrivals.append(self._ranks.send(*self._given, self._spread))
            self._spread = None

    def wait(self) -> None:
        """Let the second stream wait until all is there."""
        self.go_on()
        self._ranks.wait(self._given[1], *reversed(self._arrivals))


class Home:
    """What was made of rows or keys on its way back; see :class:`Fetch`."""

    def __init__(
        self, ranks: Ranks, what: str, n: int, step: KeyStep, nbytes: Ints | Floats, add: float
    ) -> None:
        self._ranks, self._given, self._add = ranks, (what, n), add
        self._arrivals = [ranks.send(what, n, step.straight.back(nbytes))]
        self._near = ranks.send(what, n, step.spread.back(nbytes))
        self._cross: Sent | None = step.cross.back(nbytes)

    def go_on(self) -> None:
        """Add up what comes from the own host, and send the sums across."""
        if self._cross is not None:
            self._take(self._near)
            self._arrivals.append(self._ranks.send(*self._given, self._cross))
            self._cross = None

    def wait(self) -> None:
        """Let the second stream wait until all is there and added."""
        self.go_on()
        self._take(*self._arrivals)

    def _take(self, *arrivals: Arrival) -> None:
        self._ranks.wait(self._given[1], *arrivals)
        received = np.sum([each.received for each in arrivals], axis=0)
        self._ranks.move_memory(self._given[1], self._add * received)
