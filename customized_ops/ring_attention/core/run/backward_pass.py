"""One backward of one rank; the steps are those of ``executor``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.pending import Pending
from ..comm.transfer_side import Dims, add
from ..kernels import BackwardOperands
from ..merge.merge import Sum, span_of
from ..plan.exchanges.exchange import Exchange
from ..plan.rank_plan import Stage
from ..tape import copied
from .rank_heads import RankHeads, concat_heads
from .rank_pass import Keys, Queries, RankCall, RankPass, counted_from
from .replays.replay import kernel_backward


class BackwardPass(RankPass[Sum]):
    """See :func:`.executor.attention_backward`; ``wire``: dtype of gradients between ranks."""

    def __init__(
        self, call: RankCall, given: BackwardOperands, wire: torch.dtype, *, deterministic: bool
    ) -> None:
        super().__init__(call)
        dout, self._q, k, v, out, lse, dlse = given
        self._rows = [dout, self._q, out, lse] if dlse is None else [dout, self._q, out, lse, dlse]
        self._k, self._v = k, v
        self._wire, self._deterministic = wire, deterministic
        self._own = Queries(self.share.of_queries(self._rows))
        row_parts, key_parts = self.mine.row_parts, self.mine.key_parts
        self._dq, self._dk, self._dv = Sum(self._q, row_parts), Sum(k, key_parts), Sum(v, key_parts)
        # What the second stream adds up for the rank's own keys.
        self._late_dk, self._late_dv = Sum(k, key_parts), Sum(v, key_parts)
        self._going_home: deque[Pending] = deque()
        # Whether older gradients of keys are waited for, so that only the last are on their way.
        self._few_at_once = self._plan.few_at_once

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv of the rank's tokens."""
        own_last = self.own_last(self._q, self._k, self._v)
        with self.streams.second():
            self.begin()
            asked = self.ask_queries(self._rows)  # 1.
            rounds = self.ask_keys(self._q, self._k, self._v)
        if not own_last:
            self._attend_local()  # 2.
        with self.streams.second():
            self._remote = Queries(asked.wait(), remote=True)
            late = Sum(span_of(self._q, 1, *self.late_rows), self.mine.row_parts)
            self.parts = late, Sum(self._remote.tensors[1], self.mine.remote_parts)
            self.attend_rounds(rounds)  # 3. and 4.
        if own_last:
            self._attend_local()
        self.streams.join()
        if not self._few_at_once:
            self._add_late()  # 5.
        while self._going_home:
            self._going_home.popleft().wait()
        if self._few_at_once:  # some of what came home was added to the late sums
            self._add_late()
        self.end()
        grads = self._dq.result(), self._dk.result(), self._dv.result()
        self.leave()
        return grads

    def agreed(self) -> tuple[object, ...]:
        dlse = len(self._rows) > 4
        return *self.agreed_on(self._q, self._k, self._v), dlse, self._wire

    def _attend_local(self) -> None:
        if self.local is not None:
            dq, dk, dv = self.attend(0, self._own, self.own_keys(self._k, self._v))
            share, rows = self.share, counted_from(0, self.local.own_hull)
            share.add(self._dq, dq, share.rows, rows)
            share.add(self._dk, dk, share.keys)
            share.add(self._dv, dv, share.keys)

    def parts_of(self, heads: RankHeads) -> tuple[Sum, Sum]:
        own, remote = (heads.of(t, heads.rows) for t in (self._q, self._remote.tensors[1]))
        late = span_of(own, 1, *self.late_rows)
        return Sum(late, self.mine.row_parts), Sum(remote, self.mine.remote_parts)

    def attend_stage(self, n: int, stage: Stage, keys: Keys, parts: tuple[Sum, Sum]) -> None:
        dk, dv, dqs = Sum(keys.k), Sum(keys.v), []
        for queries in self.late_queries(stage, self._own, self._remote):
            dq, part_k, part_v = self.attend(n, queries, keys)
            dqs.append((queries, dq))
            dk.add(part_k)
            dv.add(part_v)
        self._give_keys(n, stage, keys.heads, dk, dv)
        for queries, dq in dqs:
            rows = self.rows_in_part(stage, queries)
            if parts is self.parts and not queries.remote:
                self.share.add(parts[0], dq, self.share.rows, rows)
            else:
                parts[queries.remote].add(dq, rows)

    def join_heads(self, total: Sum, groups: Sequence[Sum]) -> None:
        (dq,) = concat_heads([(group.so_far(),) for group in groups], 2)
        total.add(dq)

    def send_rows_home(self) -> None:
        self._add_at_home([self.parts[1]], [self._dq], self.share.rows)

    def attend(self, stage: int, queries: Queries, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
        """dq for the hull of the rows that attend some of the stage's keys, and dk and dv."""
        dout, q, out, lse, *dlse = self.of_heads(queries, keys.heads)
        (start, stop), pairs, tokens = keys.heads.call(stage, queries.remote)
        dout, q, out = [span_of(t, 1, start, stop) for t in (dout, q, out)]
        lse, *dlse = [span_of(t, 2, start, stop) for t in (lse, *dlse)]
        operands = BackwardOperands(dout, q, keys.k, keys.v, out, lse, *dlse)
        return kernel_backward(
            self._kernel,
            operands,
            pairs,
            keys.heads.scoring,
            tokens,
            deterministic=self._deterministic,
        )

    def _give_keys(self, n: int, stage: Stage, heads: RankHeads, dk: Sum, dv: Sum) -> None:
        """Send gradients of received keys home; add up those of the rank's own keys."""
        if stage.kv is not None:
            late = self._few_at_once
            totals = [self._late_dk, self._late_dv] if late else [self._dk, self._dv]
            with self._comm.together():
                self._add_at_home([dk, dv], totals, heads.keys, n)
                if late and len(self._going_home) > 1:
                    self._going_home[-2].go_on()
            while late and len(self._going_home) > 2:
                self._going_home.popleft().wait()
        elif len(stage.remote):
            self.share.add(self._late_dk, dk.so_far(), self.share.keys)
            self.share.add(self._late_dv, dv.so_far(), self.share.keys)

    def _add_at_home(
        self, parts: list[Sum], totals: list[Sum], dims: Dims, stage: int | None = None
    ) -> None:
        """Send sums to the tokens' owners, who add them to their ``totals``."""
        results, every = [part.so_far() for part in parts], [dims] * len(parts)
        into = lambda: [total.place() for total in totals]  # noqa: E731
        exchange, seen_by = self.exchange(stage)
        keeps = not dims.shares and self._keep_own(exchange, results, totals)
        # Only a stage's gradients may be written over the keys that were fetched last: no later
        # stage waits for that memory.
        over = None if stage is None else self.last
        given = exchange, results, into, every, add, self._wire, seen_by, over, keeps
        self._going_home.append(self._comm.send_home(*given))

    def _keep_own(
        self, exchange: Exchange, results: Sequence[Tensor], totals: Sequence[Sum]
    ) -> bool:
        """Add what a rank made for its own tokens to its sums, and say so. Sums that start with it
        need no zeros. Not where its tokens are scattered."""
        rank = self._comm.rank
        if rank not in exchange.sent:
            return False
        home, there = exchange.sent[rank], exchange.received[rank]
        if home.ranges is not None or there.ranges is not None:
            return False
        rows = slice(home.start, home.start + home.count)
        for result, total in zip(results, totals, strict=True):
            total.add(copied(Tensor.clone, result.narrow(1, there.start, there.count)), rows)
        return True

    def _add_late(self) -> None:
        late_dq, _ = self.parts
        if not late_dq.empty:
            self._dq.add(late_dq.so_far(), slice(*self.late_rows))
        for total, late in ((self._dk, self._late_dk), (self._dv, self._late_dv)):
            if not late.empty:
                total.add(late.so_far())
