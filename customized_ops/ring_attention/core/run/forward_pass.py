"""One forward of one rank; the steps are those of ``executor``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..comm.pending import Pending
from ..comm.transfer_side import merge, place
from ..kernels import ForwardOperands
from ..merge.merge import Accumulator, accumulation_dtype, as_dtype, span_of
from ..plan.rank_plan import Stage
from .rank_heads import RankHeads, concat_heads
from .rank_pass import Keys, Queries, RankCall, RankPass, counted_from
from .replays.replay import kernel_forward


class ForwardPass(RankPass[Accumulator]):
    """See :func:`.executor.attention_forward`."""

    def __init__(self, call: RankCall, given: ForwardOperands) -> None:
        super().__init__(call)
        self._q, self._k, self._v = given
        self._own = Queries([self.share.of(given.q, self.share.rows)])
        # The result of the rank's own rows over its own keys.
        self._at_once = Accumulator(self._own.tensors[0].shape[1], self.mine.row_parts)
        self._home: Pending | None = None  # results of remote queries, on their way home
        self._results: list[Tensor] = []  # out and lse; empty until they are there

    def run(self) -> tuple[Tensor, Tensor]:
        """Returns out and lse of the rank's rows."""
        with self.streams.second():
            self.begin()
            asked = self.ask_queries([self._q])  # 1.
            rounds = self.ask_keys(self._q, self._k, self._v)
        self._attend_local()  # 2.
        with self.streams.second():
            self._remote = Queries(asked.wait(), remote=True)
            self.parts = self.parts_of(self.share)
            self.attend_rounds(rounds)  # 3. and 4.
            if self._home is None:
                self.end()  # peers need not wait for what the first stream still attends
        self.streams.join()
        self._results += self._merged()  # 5.
        if self._home is not None:
            self._home.wait()
            self.end()
        self.leave()
        out, lse = self._results
        return as_dtype(out, self._q.dtype), lse

    def agreed(self) -> tuple[object, ...]:
        return self.agreed_on(self._q, self._k, self._v)

    def _attend_local(self) -> None:
        if self.local is not None:
            part = self.attend(0, self._own, self.own_keys(self._k, self._v))
            self._at_once.add(*part, counted_from(0, self.local.own_hull))

    def parts_of(self, heads: RankHeads) -> tuple[Accumulator, Accumulator]:
        first, last = self.late_rows
        remote = self._remote.tensors[0].shape[1]
        return (
            Accumulator(last - first, self.mine.row_parts),
            Accumulator(remote, self.mine.remote_parts),
        )

    def attend_stage(
        self, n: int, stage: Stage, keys: Keys, parts: tuple[Accumulator, Accumulator]
    ) -> None:
        for queries in self.late_queries(stage, self._own, self._remote):
            part = self.attend(n, queries, keys)
            parts[queries.remote].add(*part, self.rows_in_part(stage, queries))

    def join_heads(self, total: Accumulator, groups: Sequence[Accumulator]) -> None:
        out, lse = concat_heads([group.so_far() for group in groups], 2, 1)
        total.add(out, lse)

    def attend(self, stage: int, queries: Queries, keys: Keys) -> tuple[Tensor, Tensor]:
        """out and lse over the keys, for the hull of the rows that attend some of the stage's."""
        (q,) = self.of_heads(queries, keys.heads)
        rows, pairs, tokens = keys.heads.call(stage, queries.remote)
        given = ForwardOperands(span_of(q, 1, *rows), keys.k, keys.v)
        return kernel_forward(self._kernel, given, pairs, keys.heads.scoring, tokens)

    def send_rows_home(self) -> None:
        parts = self.parts[1].result(self._remote.tensors[0], self._v.shape[-1], self._q.dtype)
        dims = self.share.rows, self.share.stats
        put, (exchange, seen_by) = merge if self.mine.shared_rows else place, self.exchange(None)
        self._home = self._comm.send_home(
            exchange, parts, self._results, dims, put, seen_by=seen_by
        )

    def _merged(self) -> tuple[Tensor, Tensor]:
        """out and lse of the rank's own rows, of all heads, without what comes home."""
        q, v_dim = self._q, self._v.shape[-1]
        dtype = accumulation_dtype(q.dtype) if self.mine.row_parts > 2 else q.dtype
        (own,) = self._own.tensors
        if self.late_rows[1]:  # some stage had a part of them, so they need no zeros
            late = self.parts[0].result(own, v_dim, dtype)
            self._at_once.add(*late, slice(*self.late_rows))
        out, lse = self._at_once.result(own, v_dim, dtype)
        return (out, lse) if self.share.whole else self.share.among_all(out, lse, q, v_dim)
