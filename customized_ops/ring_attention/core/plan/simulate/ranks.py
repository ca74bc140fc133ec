"""The clocks of all ranks, and what a launch, a kernel and a message do to them.

Every rank runs the same program, and what it does at one point of it depends only on what ranks did
at earlier points. So the program is stepped through once, and each event is one of all ranks.

A rank has a host, which starts one kernel after the other. It has two streams on its GPU: the
second one, which waits for peers, has priority, and the first one fills the gaps. It has links
inside its host and between hosts, whose two ways are independent or share the link. What ranks send
in one exchange shares a link, so all of it is there at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ...arrays import Bools, Floats, Ints
from ..cost_model import CostModel
from .counts import Sent
from .timeline import BETWEEN, HOST, INSIDE, KERNEL, WAITS, PassTimeline, Spans

LEVELS = INSIDE, BETWEEN


class Batch(NamedTuple):
    """Messages that leave together, so whoever waits for some of them waits for all.

    Attributes:
        begun: bool[P], whose hosts have turned to it.
        at: of each exchange, float64[2, P], when what a rank receives is there, from inside its
            host and from other hosts; 0 where nothing comes.
    """

    begun: Bools
    at: list[Floats]


class Arrival(NamedTuple):
    """What ranks receive in an exchange of a batch: how many bytes, float64[P]."""

    batch: Batch
    received: Floats


class Ranks:
    """All ranks in a pass, which all of them begin at time 0.

    Args:
        host_of: int64[P], the host of each rank.
        one_sided: whether ranks write into one another's memory, so that only the sender need be
            ready; else both have to be, and each carries out one exchange after the other.
    """

    def __init__(self, costs: CostModel, host_of: Ints, *, one_sided: bool) -> None:
        self.costs, self._host_of, self.one_sided = costs, host_of, one_sided
        ranks = len(host_of)
        self._spans: list[Spans] = []
        self._waits = np.zeros((len(WAITS), ranks))
        # Until when each is busy: hosts, second streams, kernels of these, messages by level, links
        # by level and direction.
        self._host, self._stream, self._kernel = np.zeros((3, ranks))
        self._messages = np.zeros((2, ranks))
        self._links = np.zeros((2, 2, ranks))
        self._late = np.zeros(
            ranks, dtype=np.int64
        )  # which of WAITS last held up the second streams
        self._local, self._local_from = np.zeros((2, ranks))  # seconds that first streams have
        self._batch: Batch | None = None  # of the context ``together``

    def _span(
        self,
        resource: str,
        what: str,
        stage: int,
        start: Floats,
        stop: Floats,
        *,
        sends: bool = False,
    ) -> None:
        if (stop > start).any():
            self._spans.append(Spans(resource, what, sends, stage, start, stop))

    def _launch(self, what: str, stage: int, called: Bools) -> Floats:
        """When each host turns to a call; what it starts may begin at once, and what is sent and
        merged because of it comes after."""
        began = self._host
        self._host = began + self.costs.call_seconds * called
        self._span(HOST, what, stage, began, self._host)
        return began

    def begin_local(self, seconds: Floats) -> None:
        """A kernel call on the first stream."""
        self._local_from = self._launch("own", 0, seconds > 0)
        self._local = seconds

    def attend(self, what: str, stage: int, seconds: Floats) -> None:
        """A kernel call on the second stream, of the ranks for which it takes some time."""
        began, some = self._launch(what, stage, seconds > 0), seconds > 0
        self._hold_up(HOST, np.where(some, began, 0.0))
        self._run(what, stage, seconds)

    def move_memory(self, stage: int, nbytes: Floats) -> None:
        """Read and write ``nbytes`` on the second stream."""
        self._run("merge", stage, nbytes / self.costs.memory_bytes)

    def _hold_up(self, why: str, until: Floats) -> None:
        """Hold the second streams up until a time, because of one of WAITS."""
        self._late[until > self._stream] = WAITS.index(why)
        self._stream = np.maximum(self._stream, until)

    def _run(self, what: str, stage: int, seconds: Floats) -> None:
        some = seconds > 0
        self._fill(np.where(some, self._stream, self._kernel))
        start, self._stream = self._stream, self._stream + seconds
        self._kernel = np.where(some, self._stream, self._kernel)
        self._span(KERNEL, what, stage, start, self._stream)

    def _fill(self, until: Floats) -> None:
        """Let the first stream run while the second one has no kernel, up to a time; the rest of
        that time is idle."""
        start = np.minimum(np.maximum(self._kernel, self._local_from), until)
        took = np.minimum(until - start, self._local)
        self._local = self._local - took
        self._span(KERNEL, "own", 0, start, start + took)
        idle = until - self._kernel - took
        self._waits[self._late, np.arange(len(idle))] += np.maximum(idle, 0.0)
        self._kernel = np.maximum(self._kernel, until)

    def wait(self, stage: int, *arrivals: Arrival, by: Bools | None = None) -> None:
        """Let the second streams wait, or those of the ranks ``by``; what came in messages is
        copied to its place."""
        for batch, received in arrivals:
            for at in batch.at:
                for level, each in zip(LEVELS, at, strict=True):
                    self._hold_up(level, each if by is None else np.where(by, each, 0.0))
            if not self.one_sided and received.any():
                self.move_memory(stage, 2 * received)

    def send(self, what: str, stage: int, messages: Sent) -> Arrival:
        """Send messages once the second streams and the hosts have come to this point."""
        batch = self._batch or Batch(np.zeros(len(self._host), dtype=bool), [])
        self._begin(batch, what, stage, messages)
        now = np.maximum(self._host, self._stream)
        at, done = np.zeros((2, len(now))), np.zeros_like(now)
        batch.at.append(at)
        across = self._host_of[messages.sender] != self._host_of[messages.receiver]
        latencies = self.costs.step_seconds, self.costs.between_seconds
        for level, some in enumerate((~across, across)):
            if some.any():
                ready = now if self.one_sided else np.maximum(now, self._messages[level])
                of_level = Sent(*(column[some] for column in messages))
                sent, received = self._over_links(what, stage, level, ready, of_level)
                at[level] = np.where(received > 0, received + latencies[level], 0.0)
                if self.one_sided:
                    done = np.maximum(done, sent)
                else:
                    busy = np.maximum(sent, at[level])
                    self._messages[level] = np.maximum(self._messages[level], busy)
        if self.one_sided:
            self._hold_up(INSIDE, done)  # copies are on the second streams
        return Arrival(batch, _sums(messages.receiver, messages.nbytes, len(now)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is sent in this context is one batch, on which each host spends time once."""
        outer, batch = self._batch, Batch(np.zeros(len(self._host), dtype=bool), [])
        self._batch = outer or batch
        yield
        self._batch = outer

    def _begin(self, batch: Batch, what: str, stage: int, messages: Sent) -> None:
        """Let the hosts of all that send or receive messages turn to them."""
        if self.one_sided:
            return
        ends = np.concatenate([messages.sender, messages.receiver])
        count, began = np.bincount(ends, minlength=len(self._host)), self._host
        some = count > 0
        of_batch = self.costs.batch_seconds * (some & ~batch.begun)
        self._host = began + of_batch + self.costs.message_seconds * count
        batch.begun[some] = True
        self._span(HOST, what, stage, began, self._host)

    def _over_links(
        self, what: str, stage: int, level: int, ready: Floats, messages: Sent
    ) -> tuple[Floats, Floats]:
        """When all is sent, and when all is received, over links of one level by ranks that are
        ``ready``, float64[P]; 0 where nothing is."""
        sender, receiver, nbytes = messages
        rate, alone = self._rates(level)
        if alone > 1 and not self.one_sided:
            return self._over_shared_links(what, stage, level, ready, messages)
        begin = ready[sender] if self.one_sided else np.maximum(ready[sender], ready[receiver])
        ways = []
        over = begin + nbytes / rate  # of a message by itself
        for way, rank in enumerate((sender, receiver)):
            first, last = np.full(len(ready), np.inf), np.zeros_like(ready)
            np.minimum.at(first, rank, begin)
            takes = _sums(rank, nbytes / rate, len(ready))
            stop = np.maximum(first, self._links[level, way]) + takes
            np.maximum.at(last, rank, over)
            stop = np.where(takes > 0, np.maximum(stop, last), 0.0)
            self._links[level, way] = np.maximum(self._links[level, way], stop)
            self._span(LEVELS[level], what, stage, stop - takes, stop, sends=way == 0)
            over = stop[sender]  # all that arrives has been sent before
            ways.append(stop)
        return ways[0], ways[1]

    def _rates(self, level: int) -> tuple[float, float]:
        """Bytes per second each way, and how many times as many one way alone."""
        costs = self.costs
        of_level = (
            (costs.link_bytes, costs.link_alone),
            (costs.between_bytes, costs.between_alone),
        )
        return of_level[level]

    def _over_shared_links(
        self, what: str, stage: int, level: int, ready: Floats, messages: Sent
    ) -> tuple[Floats, Floats]:
        """:meth:`_over_links` of messages where what a rank sends and what it receives share its
        link."""
        sender, receiver, nbytes = messages
        rate, alone = self._rates(level)
        begin, ranks = np.maximum(ready[sender], ready[receiver]), len(ready)
        ways = np.stack([_sums(rank, nbytes / rate, ranks) for rank in (sender, receiver)])
        takes = np.maximum(ways.max(axis=0) / alone, ways.sum(axis=0) / 2)
        first, last = np.full(ranks, np.inf), np.zeros(ranks)
        for rank in (sender, receiver):
            np.minimum.at(first, rank, begin)
            np.maximum.at(last, rank, begin + nbytes / (rate * alone))
        stop = np.maximum(first, self._links[level].max(axis=0)) + takes
        stop = np.where(takes > 0, np.maximum(stop, last), 0.0)
        sent = stop.copy()
        np.maximum.at(stop, receiver, sent[sender])  # all that arrives has been sent before
        self._links[level] = np.maximum(self._links[level], stop)
        until = np.where(ways > 0, stop, 0.0)
        for way, each in enumerate(until):
            start = np.where(each > 0, stop - takes, 0.0)
            self._span(LEVELS[level], what, stage, start, each, sends=way == 0)
        return until[0], until[1]

    def join(self) -> None:
        """Let the first stream finish, and both go on from there."""
        rest = np.maximum(self._kernel, self._local_from) + self._local
        self._fill(np.where(self._local > 0, rest, self._kernel))
        self._stream = np.maximum(self._stream, self._kernel)

    def end(self) -> PassTimeline:
        """What has happened until each rank has what it waits for, and its host is done."""
        self._hold_up(HOST, self._host)
        self._fill(self._stream)
        return PassTimeline(tuple(self._spans), self._stream, self._waits)


def _sums(rank: Ints, of_each: Floats, ranks: int) -> Floats:
    """float64[ranks]: the sum of ``of_each`` for each rank."""
    return np.bincount(rank, of_each, ranks).astype(np.float64)
