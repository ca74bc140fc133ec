"""In which order the ranks of a plan ask for rows and keys, attend them and send results home.

This is the executor (``core/run/rank_pass.py``, ``forward_pass.py``, ``backward_pass.py``) without
tensors: the same exchanges, kernel calls and waits in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...arrays import Bools, Floats, Ints
from ..heads import TokenBytes
from ..plan_value import PlanValue
from .counts import OWN, REMOTE, Counts, KeyStep, Sent
from .ranks import Arrival, Ranks
from .timeline import PassTimeline


@dataclass(frozen=True)
class PassWork:
    """What a pass takes on each rank, float64[P].

    Attributes:
        pair_seconds: kernel time per pair, with the rank's heads.
        token_bytes: bytes of the tokens that move.
        merge_bytes: bytes read and written to merge a row's results with earlier ones, or to add
            gradients of q.
        beside_bytes: the same to place a row's results of one group of heads next to the others'.
        add: bytes read and written for each byte that comes home.
    """

    pair_seconds: Floats
    token_bytes: TokenBytes
    merge_bytes: Floats
    beside_bytes: Floats
    add: float


class Schedule:
    """A forward or a backward of all ranks; ``groups``: how many groups of heads keys arrive in."""

    def __init__(
        self, plan: PlanValue, counts: Counts, groups: int, work: PassWork, ranks: Ranks
    ) -> None:
        self._plan, self._counts, self._work, self._ranks = plan, counts, work, ranks
        self._groups = groups
        self._received = [(n, step) for n, step in enumerate(counts.keys) if step is not None]
        self._waiting = deque(self._received * groups)
        self._coming: deque[Fetch] = deque()
        self._homes: deque[Home] = deque()

    def run(self) -> PassTimeline:
        """Carry out the pass."""
        ranks, rows = self._ranks, KeyStep(self._counts.rows)
        asked = Fetch(ranks, "rows", 0, rows, self._work.token_bytes.row_out)
        for _ in range(len(self._waiting) if ranks.one_sided else 1):
            self._ask()
        had = np.zeros((2, self._plan.group_size), dtype=bool)  # results of own, of received rows
        here = self._counts.keys[0] is None
        if here:
            ranks.begin_local(self._seconds(0, OWN))
            had[OWN] = self._counts.pairs[0, OWN] > 0
        asked.wait()
        if self._plan.relays:
            self._go_on()
        rows_left = self._plan.rows_move
        if here:
            ranks.attend("remote", 0, self._seconds(0, REMOTE))
            had[REMOTE] = self._counts.pairs[0, REMOTE] > 0
            if rows_left and self._plan.remote_stages == 1:
                self._send_rows_home()
                rows_left = False
        for _ in range(self._groups):
            self._attend_round(had)
        if rows_left:
            self._send_rows_home()
        ranks.join()
        while self._homes:
            self._homes.popleft().wait()
        return ranks.end()

    def _ask(self) -> None:
        if self._waiting:
            n, step = self._waiting.popleft()
            nbytes = self._work.token_bytes.key_out / self._groups
            keys = Fetch(self._ranks, "keys", n, step, nbytes, relays=self._plan.relays)
            self._coming.append(keys)

    def _attend_round(self, had: Bools) -> None:
        """Attend the keys that are received, of one group of heads; ``had``, bool[2, P], says for
        which rows there are results from before."""
        now = np.zeros_like(had)
        back = self._work.token_bytes.key_back / self._groups
        for n, step in self._received:
            self._take_keys()
            for whose, what in ((OWN, "own"), (REMOTE, "remote")):
                self._ranks.attend(what, n, self._seconds(n, whose) / self._groups)
            if back.any():
                few = self._plan.few_at_once
                with self._ranks.together():
                    self._send_home("gradients", n, step, back)
                    if few and len(self._homes) > 1:
                        self._homes[-2].go_on()
                while few and len(self._homes) > 2:
                    self._homes.popleft().wait()
            for whose in (OWN, REMOTE):
                self._merge(n, whose, had[whose], now[whose])

    def _take_keys(self) -> None:
        self._coming.popleft().wait()
        self._go_on()

    def _go_on(self) -> None:
        """Send on what has crossed, and ask for more."""
        with self._ranks.together():
            for each in list(self._coming)[: self._plan.relays]:
                each.go_on()
            self._ask()

    def _merge(self, n: int, whose: int, had: Bools, now: Bools) -> None:
        """Merge what a stage makes of some rows with what there is of them, from before (``had``)
        or from this group of heads (``now``)."""
        some, rows = self._counts.pairs[n, whose] > 0, self._counts.hulls[n, whose]
        beside = self._work.beside_bytes * (self._groups > 1) * (some & ~now)
        merged = self._work.merge_bytes * (some & (had | now))
        self._ranks.move_memory(n, rows * (beside + merged) / self._groups)
        now |= some

    def _send_rows_home(self) -> None:
        stage, rows = self._plan.remote_stages - 1, KeyStep(self._counts.rows)
        self._send_home("results", stage, rows, self._work.token_bytes.row_back)

    def _send_home(self, what: str, n: int, step: KeyStep, nbytes: Ints | Floats) -> None:
        self._homes.append(Home(self._ranks, what, n, step, nbytes, self._work.add))

    def _seconds(self, n: int, whose: int) -> Floats:
        """Time of a kernel call with all heads."""
        return self._counts.pairs[n, whose] * self._work.pair_seconds


class Fetch:
    """Rows or keys on their way to where they are attended; ``nbytes``: number[P], of a token
    there. Where the plan ``relays`` keys, those that cross come first."""

    def __init__(
        self,
        ranks: Ranks,
        what: str,
        n: int,
        step: KeyStep,
        nbytes: Ints | Floats,
        *,
        relays: bool = False,
    ) -> None:
        self._ranks, self._given = ranks, (what, n)
        self._takes_part = _of_ways(step, len(nbytes))
        self._ways = [step.straight.out(nbytes), step.spread.out(nbytes)]
        self._arrivals: list[Arrival] = []
        self._cross = ranks.send(what, n, step.cross.out(nbytes)) if relays else None
        if not relays:
            self.go_on()

    def go_on(self) -> None:
        """Wait for what crosses, and send it on inside the host, with what comes straight."""
        if self._arrivals:
            return
        if self._cross is not None:
            self._ranks.wait(self._given[1], self._cross, by=self._takes_part.cross)
        with self._ranks.together():
            self._arrivals = [self._ranks.send(*self._given, way) for way in self._ways]

    def wait(self) -> None:
        """Let the second stream wait until all is there."""
        self.go_on()
        straight, spread = self._arrivals
        self._ranks.wait(self._given[1], spread, by=self._takes_part.spread)
        self._ranks.wait(self._given[1], straight, by=self._takes_part.straight)


class Home:
    """What was made of rows or keys on its way back; see :class:`Fetch`."""

    def __init__(
        self, ranks: Ranks, what: str, n: int, step: KeyStep, nbytes: Ints | Floats, add: float
    ) -> None:
        self._ranks, self._given, self._add = ranks, (what, n), add
        self._takes_part = _of_ways(step, len(nbytes))
        with ranks.together():
            self._straight = ranks.send(what, n, step.straight.back(nbytes))
            self._near = ranks.send(what, n, step.spread.back(nbytes))
        self._cross: Sent | None = step.cross.back(nbytes)
        self._crossed: Arrival | None = None

    def go_on(self) -> None:
        """Add up what comes from the rank's own host, and send the sums across."""
        if self._cross is not None:
            self._take(self._near, by=self._takes_part.spread)
            self._crossed = self._ranks.send(*self._given, self._cross)
            self._cross = None

    def wait(self) -> None:
        """Let the second stream wait until all is there and added."""
        self.go_on()
        self._take(self._straight, by=self._takes_part.straight)
        if self._crossed is not None:
            self._take(self._crossed, by=self._takes_part.cross)

    def _take(self, arrival: Arrival, by: Bools) -> None:
        self._ranks.wait(self._given[1], arrival, by=by)
        self._ranks.move_memory(self._given[1], self._add * arrival.received)


class OfWays(NamedTuple):
    """bool[P] each: which ranks have messages of each way of a :class:`KeyStep`."""

    straight: Bools
    cross: Bools
    spread: Bools


def _of_ways(step: KeyStep, ranks: int) -> OfWays:
    found = np.zeros((len(step), ranks), dtype=bool)
    for some, messages in zip(found, step, strict=True):
        some[messages.holder] = some[messages.reader] = True
    return OfWays(*found)
