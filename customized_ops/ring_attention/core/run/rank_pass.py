"""What a forward and a backward of one rank share: streams, exchanges and stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from ..comm import Comm
from ..comm.messages import SeenBy
from ..comm.pending import Pending
from ..comm.signals import fingerprint
from ..index_table import IndexTable
from ..kernels import Kernel
from ..merge.merge import Accumulator, Sum
from ..plan import Plan
from ..plan.exchanges.exchange import Exchange
from ..plan.rank_plan import Range, Stage
from . import side_stream
from .rank_heads import RankHeads
from .side_stream import SideStream

Part = TypeVar("Part", Accumulator, Sum)  # what a pass makes of rows

LARGE_BYTES = 64 << 20  # bytes of a rank's k and v from which on a GPU is far behind its host


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


class Round(NamedTuple):
    """Stages in their order, with their numbers and their keys, all of the same heads."""

    heads: RankHeads
    stages: Iterator[tuple[int, Stage, Keys]]


class RankPass(ABC, Generic[Part]):
    """A forward or a backward of one rank; ``mine`` is its part of the plan.

    Attributes:
        parts: the results so far of the rank's own rows that attend keys of further stages, and of
            remote queries.
    """

    parts: tuple[Part, Part]

    def __init__(self, call: RankCall) -> None:
        self._plan, self._comm, self._kernel, self.share = call
        self.mine = self._plan.rank(self._comm.rank)
        self.local, self.late_rows = self.mine.local, self.mine.late_rows
        self._moves = self._plan.rows_move or self._plan.keys_move
        self.last: Pending | None = None  # the last fetch of keys, once they are here
        # Memory that peers write to has a place for all that a pass receives, so where a rank holds
        # few keys at once, they come by messages. So does what is relayed.
        bounded = self._plan.held_keys > 0 or bool(self._plan.relays)
        self._writes = self._comm.writes_to_peers and not bounded
        self.share.send_tables(self._kernel, self._tables_of_peers, writes=self._writes)
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
        """Called before the first exchange with a peer."""
        self.streams.fork()
        if self._moves:
            if not self._writes:
                self._comm.expect_messages()
            self._comm.begin(fingerprint(self._plan, type(self).__name__, *self.agreed()))

    @abstractmethod
    def agreed(self) -> tuple[object, ...]:
        """What ranks must agree on besides the plan: all that is computed or sent depends on it."""

    def agreed_on(self, *tensors: Tensor) -> tuple[object, ...]:
        """Shapes without the tokens, dtypes, and how scores become probabilities."""
        scoring, seed = self.share.scoring, self.share.scoring.dropout_seed
        kinds = [(t.shape[:1], t.shape[2:], t.dtype) for t in tensors]
        # What is on a GPU cannot be read here.
        seeded = None if seed is None or seed.is_cuda else seed.tolist()
        sloped = scoring.alibi_slopes is not None
        return kinds, scoring.softmax_scale, scoring.softcap, sloped, scoring.dropout_p, seeded

    def end(self) -> None:
        """Called after the last use of what peers have sent: now they may start the next pass."""
        if self._moves:
            self._comm.end()

    def leave(self) -> None:
        """Called when nothing can fail any more. An error before leaves peers at another step."""
        if self._moves:
            self._comm.leave()

    def ask_queries(self, tensors: Sequence[Tensor]) -> Pending:
        """Ask for remote queries. ``tensors`` are as in :class:`Queries`, but with all heads. Where
        no rows move, they are returned as they are: no stage attends remote queries then."""
        if not self._plan.rows_move:
            return Pending(lambda: tensors)
        exchange, seen_by = self.exchange(None)
        dims = self.share.query_dims(len(tensors))
        return self._comm.fetch(exchange, tensors, dims, seen_by)

    def ask_keys(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Round]:
        """Ask for keys. Returns all stages with their keys, which are waited for when a stage is
        reached; meanwhile as many further exchanges as the Comm likes are on their way. Where keys
        arrive in groups of heads, the first round has the stages of own keys, with all heads, and
        then each group has a round of the other stages."""
        groups: list[RankHeads] = self.share.groups(q, k)
        waiting = deque((n, heads) for heads in groups for n, _ in self.mine.key_exchanges)
        coming: deque[Pending] = deque()

        def ask() -> None:
            n, heads = waiting.popleft()
            exchange, seen_by = self.exchange(n)
            coming.append(self._comm.fetch(exchange, [k, v], [heads.keys] * 2, seen_by))

        def go_on() -> None:
            # Relayed keys travel in two parts: during their second, the next are on their first.
            with self._comm.together():
                for each in list(coming)[: self._plan.relays]:
                    each.go_on()
                if waiting:
                    ask()

        def arrived(heads: RankHeads) -> Keys:
            here = coming.popleft()
            # Its keys are put together, which frees the messages, before others begin to arrive.
            keys, values = here.wait()
            go_on()
            self.last = None if coming else here
            return Keys(heads, keys, values)

        def stages(heads: RankHeads) -> Iterator[tuple[int, Stage, Keys]]:
            for n, stage in enumerate(self.mine.stages):
                if stage.kv is not None and heads in groups:
                    yield n, stage, arrived(heads)
                elif stage.kv is None and heads is self.share:
                    yield n, stage, self.own_keys(k, v)

        def rounds() -> Iterator[Round]:
            if self._plan.relays:
                go_on()
            for heads in groups if groups == [self.share] else [self.share, *groups]:
                yield Round(heads, stages(heads))

        for _ in range(min(self._comm.ahead if self._writes else 1, len(waiting))):
            ask()
        return rounds()

    def own_keys(self, k: Tensor, v: Tensor) -> Keys:
        """The rank's own keys, read in place."""
        dims = self.share.keys
        return Keys(self.share, self.share.of(k, dims), self.share.of(v, dims))

    def attend_rounds(self, rounds: Iterator[Round]) -> None:
        """Steps 3 and 4 of the executor."""
        rows_left = self._plan.rows_move
        of_groups = []
        for heads, stages in rounds:
            parts = self.parts
            if heads is not self.share:
                parts = self.parts_of(heads)
                of_groups.append(parts)
            for n, stage, keys in stages:
                self.attend_stage(n, stage, keys, parts)
                del keys  # their memory is free before the next keys are put together
                # Results go home while further keys are attended, from all ranks at this point,
                # because ranks exchange in one order.
                if rows_left and heads is self.share and n + 1 == self._plan.remote_stages:
                    self.send_rows_home()
                    rows_left = False
        for total, parts in zip(self.parts, zip(*of_groups, strict=True), strict=False):
            if not parts[0].empty:
                self.join_heads(total, parts)
        if rows_left:
            self.send_rows_home()

    @abstractmethod
    def parts_of(self, heads: RankHeads) -> tuple[Part, Part]:
        """Results like ``parts``, for a group of heads."""

    @abstractmethod
    def attend_stage(self, n: int, stage: Stage, keys: Keys, parts: tuple[Part, Part]) -> None:
        """Attend keys with all rows that there are, on the second stream."""

    @abstractmethod
    def join_heads(self, total: Part, groups: Sequence[Part]) -> None:
        """Add the parts of the groups of heads to the part of all heads."""

    @abstractmethod
    def send_rows_home(self) -> None:
        """Send home what was made of remote queries."""

    def late_queries(self, stage: Stage, own: Queries, remote: Queries) -> list[Queries]:
        """The rows that attend keys of the stage on the second stream."""
        late: list[Queries] = [own] if len(stage.own) and stage is not self.local else []
        return [*late, remote] if len(stage.remote) else late

    def rows_in_part(self, stage: Stage, queries: Queries) -> slice:
        """Which rows of a part attend keys of the stage."""
        if queries.remote:
            return counted_from(0, stage.remote_hull)
        return counted_from(self.late_rows[0], stage.own_hull)

    def of_heads(self, queries: Queries, heads: RankHeads) -> Sequence[Tensor]:
        """The tensors of ``queries`` with these heads only."""
        return queries.tensors if heads is self.share else heads.of_queries(queries.tensors)

    def exchange(self, stage: int | None) -> tuple[Exchange, SeenBy | None]:
        """What moves for a stage's keys, or, for None, remote queries: here, and on each peer if
        ranks write to one another."""
        here = self._exchange_of(self._comm.rank, stage)
        return here, (lambda n: self._exchange_of(n, stage)) if self._writes else None

    def _exchange_of(self, rank: int, stage: int | None) -> Exchange:
        of_rank = self._plan.exchanges(rank)
        exchange = of_rank.q if stage is None else of_rank.kv[stage]
        assert exchange is not None
        return exchange

    def _tables_of_peers(self) -> list[IndexTable]:
        """Tables of where this rank's tokens go in peers' buffers, if it writes there itself."""
        if not (self._moves and self._writes):
            return []
        places = []
        for stage in (None, *(n for n, _ in self.mine.key_exchanges)):
            exchange = self._exchange_of(self._comm.rank, stage)
            peers = (peer for peer in exchange.sent if peer != self._comm.rank)
            places += [self._exchange_of(n, stage).received[self._comm.rank] for n in peers]
        return [place.table for place in places if place.indices is not None]


def counted_from(start: int, rows: Range) -> slice:
    """A range of rows as counted from row ``start``."""
    return slice(rows[0] - start, rows[1] - start)
