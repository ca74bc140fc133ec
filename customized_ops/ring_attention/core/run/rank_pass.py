"""What a forward and a backward of one rank share: streams, exchanges and stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..comm import Comm
from ..comm.messages import SeenBy
from ..comm.pending import Pending
from ..index_table import IndexTable
from ..kernels import Kernel
from ..plan import Plan
from ..plan.exchange import Exchange
from ..plan.rank_plan import Range, Stage
from . import side_stream
from .rank_heads import RankHeads
from .side_stream import SideStream

LARGE_BYTES = 64 << 20  # of a rank's k and v, from which on a GPU is far behind its host


class Queries(NamedTuple):
    """Rows that attend keys, with the heads of the rank's share."""

    tensors: Sequence[Tensor]  # q; in a backward dout, q, out, lse and, if it has a gradient, dlse
    remote: bool = False  # whether they are rows of other ranks, not the rank's own


class Keys(NamedTuple):
    """Keys and values of some heads: the rank's share, or a group of it."""

    heads: RankHeads
    k: Tensor
    v: Tensor


class RankCall(NamedTuple):
    """What a forward and its backward share on one rank; ``heads`` are the rank's share."""

    plan: Plan
    comm: Comm
    kernel: Kernel
    heads: RankHeads


Attending = list[tuple[Queries, list[tuple[Tensor, ...]]]]  # rows, results of groups of heads
Arriving = Iterator[tuple[int, Stage, Iterator[Keys]]]


class RankPass:
    """A forward or a backward of one rank; ``mine`` is its part of the plan."""

    def __init__(self, call: RankCall) -> None:
        self._plan, self._comm, self._kernel, self.share = call
        self.mine = self._plan.rank(self._comm.rank)
        self.local, self.late_rows = self.mine.local, self.mine.late_rows
        self._moves = self._plan.rows_move or self._plan.keys_move
        self.last: Pending | None = None  # fetch of keys, once they are here
        self.share.send_tables(self._kernel, self._tables_of_peers)
        two = self._moves and self._comm.two_streams
        self.streams = SideStream(self.share.device, two=two)

    def own_last(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether a backward launches the call over the rank's own keys last. With two streams this
        hardly changes the timing on the GPU. It lowers peak memory, because dk and dv of received
        keys have been sent home by then. With few key heads the call over own keys takes the most
        memory itself, so nothing is won."""
        large = k.nbytes + v.nbytes >= max(q.nbytes, LARGE_BYTES)
        return self.streams.two and large and not side_stream.ONE_QUEUE

    def begin(self) -> None:
        """Before the first exchange with a peer."""
        self.streams.fork()
        if self._moves:
            self._comm.begin()

    def end(self) -> None:
        """After the last use of what peers have sent: they may start the next pass."""
        if self._moves:
            self._comm.end()

    def leave(self) -> None:
        """Nothing can fail any more; an error before this leaves peers at another step."""
        if self._moves:
            self._comm.leave()

    def ask_queries(self, tensors: Sequence[Tensor]) -> Pending:
        """Remote queries, of tensors as :class:`Queries` has them but with all heads. Where no rows
        move, the tensors themselves: no stage attends remote queries then."""
        if not self._plan.rows_move:
            return Pending(lambda: tensors)
        exchange, seen_by = self.exchange(None)
        dims = self.share.query_dims(len(tensors))
        return self._comm.fetch(exchange, tensors, dims, seen_by)

    def ask_keys(self, q: Tensor, k: Tensor, v: Tensor) -> Arriving:
        """Each stage with its number and its keys, one group of heads after the other, which have
        arrived when they are looked at. As many of the following groups as the Comm likes are on
        their way meanwhile."""
        groups = self.share.groups(q, k)
        waiting = deque((n, heads) for n, _ in self.mine.key_exchanges for heads in groups)
        coming: deque[Pending] = deque()

        def ask() -> None:
            n, heads = waiting.popleft()
            exchange, seen_by = self.exchange(n)
            dims = [heads.keys] * 2
            peers = None if self._plan.relays else seen_by  # what is relayed comes by messages
            coming.append(self._comm.fetch(exchange, [k, v], dims, peers))

        def arriving(stage: Stage) -> Iterator[Keys]:
            if stage.kv is None:
                yield self.own_keys(k, v)
                return
            for heads in groups:
                here = coming.popleft()
                if waiting:
                    ask()
                for each in (here, *list(coming)[:1]):
                    each.go_on()
                keys, values = here.wait()
                self.last = None if coming else here
                yield Keys(heads, keys, values)

        # Relayed keys have a second part of their way, for which the next ones are on their first.
        for _ in range(min(self._comm.ahead + self._plan.relays, len(waiting))):
            ask()
        return ((n, stage, arriving(stage)) for n, stage in enumerate(self.mine.stages))

    def own_keys(self, k: Tensor, v: Tensor) -> Keys:
        """The rank's own keys, read in place."""
        dims = self.share.keys
        return Keys(self.share, self.share.of(k, dims), self.share.of(v, dims))

    def attending(self, stage: Stage, own: Queries, remote: Queries) -> Attending:
        """The rows that attend keys of the stage on the second stream, with lists for results."""
        some: Attending = []
        if len(stage.own) and stage is not self.local:
            some.append((own, []))
        if len(stage.remote):
            some.append((remote, []))
        return some

    def of_heads(self, queries: Queries, heads: RankHeads) -> Sequence[Tensor]:
        """The tensors of ``queries`` with these heads only."""
        return queries.tensors if heads is self.share else heads.of_queries(queries.tensors)

    def remote_queries_done(self, stage: int) -> bool:
        """Whether after this stage no rank attends remote queries any more. Their results then go
        home while further keys are attended, from all ranks at once: they exchange in one order."""
        return self._plan.rows_move and stage + 1 == self._plan.remote_stages

    def exchange(self, stage: int | None) -> tuple[Exchange, SeenBy]:
        """What moves for a stage's keys, or for None remote queries, here and on each peer."""
        return self._exchange_of(self._comm.rank, stage), lambda n: self._exchange_of(n, stage)

    def _exchange_of(self, rank: int, stage: int | None) -> Exchange:
        of_rank = self._plan.exchanges(rank)
        exchange = of_rank.q if stage is None else of_rank.kv[stage]
        assert exchange is not None
        return exchange

    def _tables_of_peers(self) -> list[IndexTable]:
        """Where what this rank sends goes in its peers' buffers, if it writes there itself."""
        if not (self._moves and self._comm.writes_to_peers):
            return []
        places = []
        for stage in (None, *(n for n, _ in self.mine.key_exchanges)):
            exchange, seen_by = self.exchange(stage)
            peers = (peer for peer in exchange.sent if peer != self._comm.rank)
            places += [seen_by(peer).received[self._comm.rank] for peer in peers]
        return [place.table for place in places if place.indices is not None]


def counted_from(start: int, rows: Range) -> slice:
    """A range of rows as counted from row ``start``."""
    return slice(rows[0] - start, rows[1] - start)
