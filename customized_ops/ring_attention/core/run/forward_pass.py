"""One forward of one rank; the steps are those of ``executor``."""

from __future__ import annotations

from torch import Tensor

from ..comm.pending import Pending
from ..comm.transfer_side import merge, place
from ..kernels import ForwardOperands
from ..merge.merge import Accumulator, accumulation_dtype, as_dtype, span_of
from .rank_heads import concat_heads
from .rank_pass import Arriving, Keys, Queries, RankCall, RankPass, counted_from


class ForwardPass(RankPass):
    """See :func:`.executor.attention_forward`."""

    def __init__(self, call: RankCall, given: ForwardOperands) -> None:
        super().__init__(call)
        self._q, self._k, self._v = given
        self._own_q = self.share.of(given.q, self.share.rows)
        first, last = self.late_rows
        # Of the rank's own rows: over its own keys, and over those of all other stages.
        self._own = Accumulator(self._own_q.shape[1], self.mine.row_parts)
        self._late = Accumulator(last - first, self.mine.row_parts)
        self._home: Pending | None = None  # results of remote queries, on their way home
        self._results: list[Tensor] = []  # out and lse; empty until they are there

    def run(self) -> tuple[Tensor, Tensor]:
        """Returns out and lse of the rank's rows."""
        with self.streams.second():
            self.begin()
            asked = self.ask_queries([self._q])  # 1.
            stages = self.ask_keys(self._q, self._k, self._v)
        self._attend_local()  # 2.
        with self.streams.second():
            self._attend_stages(asked, stages)  # 3. and 4.
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

    def _attend_local(self) -> None:
        if self.local is not None:
            part = self.attend(0, Queries([self._own_q]), self.own_keys(self._k, self._v))
            self._own.add(*part, counted_from(0, self.local.own_hull))

    def _attend_stages(self, asked: Pending, stages: Arriving) -> None:
        own, remote = Queries([self._own_q]), Queries(asked.wait(), remote=True)
        remote_results = Accumulator(remote.tensors[0].shape[1], self.mine.remote_parts)
        for n, stage, arriving in stages:
            attending = self.attending(stage, own, remote)
            for keys in arriving:
                for queries, results in attending:
                    results.append(self.attend(n, queries, keys))
            for queries, results in attending:
                out, lse = concat_heads(results, 2, 1)
                if queries.remote:
                    remote_results.add(out, lse, counted_from(0, stage.remote_hull))
                else:
                    self._late.add(out, lse, counted_from(self.late_rows[0], stage.own_hull))
            if self.remote_queries_done(n):
                self._send_home(remote_results, remote.tensors[0])

    def attend(self, stage: int, queries: Queries, keys: Keys) -> tuple[Tensor, Tensor]:
        """out and lse over the keys, of the rows that attend some of the stage's (a hull)."""
        (q,) = self.of_heads(queries, keys.heads)
        rows, pairs, tokens = keys.heads.call(stage, queries.remote)
        given = ForwardOperands(span_of(q, 1, *rows), keys.k, keys.v)
        return self._kernel.forward(given, pairs, keys.heads.scoring, tokens)

    def _send_home(self, results: Accumulator, remote_q: Tensor) -> None:
        parts = results.result(remote_q, self._v.shape[-1], self._q.dtype)
        dims = self.share.rows, self.share.stats
        put, (exchange, seen_by) = merge if self.mine.shared_rows else place, self.exchange(None)
        self._home = self._comm.send_home(
            exchange, parts, self._results, dims, put, seen_by=seen_by
        )

    def _merged(self) -> tuple[Tensor, Tensor]:
        """out and lse of the rank's own rows, of all heads, without what comes home."""
        q, v_dim = self._q, self._v.shape[-1]
        dtype = accumulation_dtype(q.dtype) if self.mine.row_parts > 2 else q.dtype
        if self.late_rows[1]:  # some stage had a part of them, so they need no zeros
            late = self._late.result(self._own_q, v_dim, dtype)
            self._own.add(*late, slice(*self.late_rows))
        out, lse = self._own.result(self._own_q, v_dim, dtype)
        return (out, lse) if self.share.whole else self.share.among_all(out, lse, q, v_dim)
