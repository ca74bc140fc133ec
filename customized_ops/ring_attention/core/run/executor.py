"""Runs a rank's plan: the one implementation of every distributed attention pattern here.

Forward                                      Backward, the same plan reversed
1. ask for the rows this rank computes       1. the rows' q, dout, out and lse travel
   for others (guests) and for keys          2. each stage: fetch keys, add up dq, send dk and dv
2. attend the rank's own keys                   home, where they are added up
3. each further stage: attend its keys       3. dq of guest rows goes home
   as they arrive, merge
4. send guests' out and lse home, where
   results of one row are merged

What was made of guests goes home, in both passes, after the last stage in which a rank has any.

What needs nothing from peers, attending the rank's own keys with its own rows, runs on the caller's
stream; all else on a second one that goes first where both have work (``lanes``). So what waits for
peers is hidden behind what does not, and so is what travels home.

A rank computes its share of the heads only, where the plan splits them. Where it says so, received
keys arrive in groups of heads: a group is attended, and its gradients go home, while the next
arrives. Groups share no head, so their results lie side by side, with nothing to merge.
Kept between the two: q, k, v, out and lse of the rank's own tokens, nothing that was received.

Numerics; "wide" is fp32, or fp64 beside fp64 inputs:

    kernels      compute wide inside and may round each result of a call to the inputs' dtype once
    out, lse     merged wide over stages and ranks, rounded once at the end; lse stays wide
    out of guests   travels in q's dtype, as a kernel would have rounded it; lse wide
    dq, dk, dv   added up wide over stages and ranks, rounded once at the end
    dk, dv of received keys, dq of guests   travel in ``reduce_dtype``, and are added wide where
                 they arrive; what a rank holds itself is not rounded to it. By default that is
                 wide, but where each of them is one call's (no rank attends rows of others over
                 received keys) the inputs' dtype: a call may round to it, and nothing was added yet

What arrives is added or merged in rank order, so nothing here depends on who was first: the forward
is the same bit for bit from run to run, the backward where the kernel's is (``deterministic``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..comm import Comm
from ..comm.messages import Pending, SeenBy
from ..comm.transfer_side import Dims, Put, add, merge, place
from ..kernels import BackwardOperands, Kernel, Pairs, Scoring
from ..merge.merge import Accumulator, Sum, accumulation_dtype, as_dtype, span_of
from ..plan import Plan
from ..plan.exchange import Exchange
from ..plan.rank_plan import Range, RankPlan, Stage
from . import side_stream as lanes
from .head_shard import HeadShard, Parts
from .side_stream import SideStream

LARGE_BYTES = 64 << 20  # of a rank's k and v, from which on a GPU is far behind its host


def attention_forward(
    plan: Plan,
    comm: Comm,
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    key_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows.

    Args:
        q: [b, l, h, d], k: [b, m, g, d], v: [b, m, g, e]: this rank's tokens, as the plan's layouts
            say; h is a multiple of g.
        scoring: how scores become probabilities.
        key_positions: int64[k_len], where each key stands on the queries' scale, for ALiBi; None
            aligns the ends of the two sequences.
    Returns:
        out [b, l, h, e] in q's dtype and lse [b, h, l].
    """
    q, k, v = _dense(q), _dense(k), _dense(v)
    pairs = _only_call(plan, comm.rank, scoring)
    if pairs is not None:
        out, lse = kernel.forward(q, k, v, pairs, scoring, None)
        return out.to(q.dtype), lse
    share = HeadShard(plan, comm.rank, q, k, scoring, key_positions)
    run = _Pass(plan, comm, kernel, share)
    mine, own_q, v_dim = run.mine, share.of(q, share.rows), v.shape[-1]
    own = Accumulator(own_q.shape[1], mine.row_parts)
    results: list[Tensor] = []
    home: Pending | None = None
    with run.second():
        run.begin()
        rows = run.ask_rows([q], [share.rows])
        stages = run.ask_keys(q, k, v)
    if run.local is not None:
        part = run.forward(0, own_q, *share.of_keys(k, v), share)
        own.add(*part, _span(run.local.own_hull))
    with run.second():
        (guest_q,) = rows.wait()
        late = Accumulator(run.late[1] - run.late[0], mine.row_parts)
        guest = Accumulator(guest_q.shape[1], mine.guest_parts)
        for n, stage, arriving in stages:
            own_parts, guest_parts = Parts(), Parts()
            for heads, keys, values in arriving:
                if len(stage.own) and stage is not run.local:
                    own_parts.add(*run.forward(n, own_q, keys, values, heads))
                if len(stage.guest):
                    guest_parts.add(*run.forward(n, guest_q, keys, values, heads, guests=True))
            if own_parts:
                out, lse = own_parts.joined(2, 1)
                late.add(out, lse, _span(stage.own_hull, run.late[0]))
            if guest_parts:
                out, lse = guest_parts.joined(2, 1)
                guest.add(out, lse, _span(stage.guest_hull))
            if run.guests_done(n):
                put = merge if mine.shared_rows else place
                parts = guest.result(guest_q, v_dim, q.dtype)
                dims = share.rows, share.stats
                home = run.send_home(parts, lambda: results, dims, put)
        if not plan.rows_move:
            run.end()  # peers need not wait for what the first stream still attends
    run.join()
    dtype = accumulation_dtype(q.dtype) if mine.row_parts > 2 else q.dtype
    if run.late[1]:  # some stage had a part of them, so what there would be without is not needed
        own.add(*late.result(own_q, v_dim, dtype), slice(*run.late))
    out, lse = own.result(own_q, v_dim, dtype)
    if not share.whole:
        out, lse = share.among_all(out, lse, q, v_dim)
    results += out, lse
    if home is not None:
        home.wait()
        run.end()
    run.leave()
    return as_dtype(out, q.dtype), lse


def attention_backward(
    plan: Plan,
    comm: Comm,
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
    key_positions: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for this rank's q, k, v; ``out`` and ``lse`` are what the forward returned.

    Args:
        dlse: [b, h, l], the gradient of lse; None on every rank of a call, or on none.
        deterministic: whether gradients must be the same bit for bit from run to run.
        reduce_dtype: what gradients travel in, the same on every rank; None: see above.
    """
    dout, q, k, v, out = _dense(dout), _dense(q), _dense(k), _dense(v), _dense(out)
    pairs = _only_call(plan, comm.rank, scoring)
    if pairs is not None:
        given = BackwardOperands(dout, q, k, v, out, lse, dlse)
        grads = kernel.backward(given, pairs, scoring, None, deterministic=deterministic)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
    share = HeadShard(plan, comm.rank, q, k, scoring, key_positions)
    run = _Pass(plan, comm, kernel, share, deterministic)
    mine = run.mine
    wire = reduce_dtype or (q.dtype if plan.one_call_each else accumulation_dtype(q.dtype))
    rows, dims = [dout, q, out, lse], [share.rows] * 3 + [share.stats]
    if dlse is not None:
        rows, dims = [*rows, dlse], [*dims, share.stats]
    own_rows = rows
    if not share.whole:
        own_rows = [share.of(t, dim) for t, dim in zip(rows, dims, strict=True)]
    dq, dk, dv = Sum(q, mine.row_parts), Sum(k, mine.key_parts), Sum(v, mine.key_parts)
    late_dq = Sum(span_of(q, 1, *run.late), mine.row_parts)
    late_dk, late_dv = Sum(k, mine.key_parts), Sum(v, mine.key_parts)
    going_home: list[Pending] = []
    with run.second():
        run.begin()
        asked = run.ask_rows(rows, dims)
        stages = run.ask_keys(q, k, v)

    def attend_own() -> None:
        if run.local is not None:
            part, part_k, part_v = run.backward(0, own_rows, *share.of_keys(k, v), share)
            share.add(dq, part, share.rows, _span(run.local.own_hull))
            share.add(dk, part_k, share.keys)
            share.add(dv, part_v, share.keys)

    def attend_others() -> None:
        guest_rows = asked.wait()
        guest_dq = Sum(guest_rows[1], mine.guest_parts)
        for n, stage, arriving in stages:
            own_parts, guest_parts = Parts(), Parts()
            for heads, keys, values in arriving:
                group_k, group_v = Sum(keys), Sum(values)
                if len(stage.own) and stage is not run.local:
                    part, part_k, part_v = run.backward(n, own_rows, keys, values, heads)
                    own_parts.add(part)
                    group_k.add(part_k)
                    group_v.add(part_v)
                if len(stage.guest):
                    part, part_k, part_v = run.backward(
                        n, guest_rows, keys, values, heads, guests=True
                    )
                    guest_parts.add(part)
                    group_k.add(part_k)
                    group_v.add(part_v)
                if stage.kv is not None:
                    parts = [group_k.so_far(), group_v.so_far()]
                    into = lambda: [dk.place(), dv.place()]  # noqa: E731
                    dims = [heads.keys] * 2
                    going_home.append(run.send_home(parts, into, dims, add, wire, stage=n))
                elif len(stage.guest):
                    share.add(late_dk, group_k.so_far(), share.keys)
                    share.add(late_dv, group_v.so_far(), share.keys)
            if own_parts:
                (part,) = own_parts.joined(2)
                share.add(late_dq, part, share.rows, _span(stage.own_hull, run.late[0]))
            if guest_parts:
                (part,) = guest_parts.joined(2)
                guest_dq.add(part, _span(stage.guest_hull))
            if run.guests_done(n):
                parts, into = [guest_dq.so_far()], lambda: [dq.place()]
                going_home.append(run.send_home(parts, into, [share.rows], add, wire))

    if run.own_last(q, k, v):
        with run.second():
            attend_others()
        attend_own()
    else:
        attend_own()
        with run.second():
            attend_others()
    run.join()
    for total, late in ((dq, late_dq), (dk, late_dk), (dv, late_dv)):
        if not late.empty:
            total.add(late.so_far(), slice(*run.late) if total is dq else None)
    for home in going_home:
        home.wait()
    run.end()
    grads = dq.result(), dk.result(), dv.result()
    run.leave()
    return grads


def _only_call(plan: Plan, rank: int, scoring: Scoring) -> Pairs | None:
    """What a rank attends that makes one call, of all its rows over its own keys, and no more; None
    for others, and where a kernel must be told the tokens."""
    if scoring.needs_tokens:
        return None
    key = ("only call", rank)
    if key not in plan.on_device:
        local, rows, pairs = plan.rank(rank).local, plan.q_layout.sizes[rank], None
        moves = plan.rows_move or plan.keys_move
        if local is not None and local.own_hull == (0, rows) and not moves:
            pairs = Pairs(local.own_in_hull, rows, plan.k_layout.sizes[rank])
        plan.on_device[key] = pairs
    found: Pairs | None = plan.on_device[key]
    return found


Arrived = tuple[HeadShard, Tensor, Tensor]  # which heads, their keys and their values


class _Pass:
    """A forward or a backward of one rank: what it calls, and what it asks of its peers.

    Attributes:
        mine: the rank's part of the plan.
        local, late: see :class:`~.rank_plan.RankPlan`.
    """

    def __init__(
        self, plan: Plan, comm: Comm, kernel: Kernel, share: HeadShard, deterministic: bool = False
    ) -> None:
        self._plan, self._comm, self._kernel, self._share = plan, comm, kernel, share
        self._deterministic = deterministic
        self.mine = plan.rank(comm.rank)
        self.local, self.late = self.mine.local, self.mine.late_rows
        self._moves = plan.rows_move or plan.keys_move
        self._last: Pending | None = None  # fetch of keys, once they are here
        self._lanes = SideStream(share.device, two=self._moves and comm.two_streams)

    def second(self) -> AbstractContextManager[object]:
        """In this context work goes to the stream for what waits for peers."""
        return self._lanes.second()

    def own_last(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether a backward's host comes to the rank's own keys after all others. On two streams
        that hardly changes when the GPU does, but it does change what lies in memory beside the
        call made last: of own keys dq, dk and dv, of others dq alone, as their dk and dv are on
        their way home. (With fewer key heads the call of own keys itself takes the most.)"""
        large = k.nbytes + v.nbytes >= max(q.nbytes, LARGE_BYTES)
        return self._lanes.two and large and not lanes.ONE_QUEUE

    def begin(self) -> None:
        """Before the first word with a peer."""
        self._lanes.fork()
        if self._moves:
            self._comm.begin()

    def join(self) -> None:
        """From here on all work is on one stream again."""
        self._lanes.join()

    def end(self) -> None:
        """After the last use of what peers have sent: they may start the next pass."""
        if self._moves:
            self._comm.end()

    def leave(self) -> None:
        """Nothing can fail any more; an error before this leaves peers at another step."""
        if self._moves:
            self._comm.leave()

    def ask_rows(self, tensors: Sequence[Tensor], dims: Sequence[Dims]) -> Pending:
        """Rows that this rank computes for others; where none move, any: no stage has guests."""
        if not self._plan.rows_move:
            return Pending(lambda: tensors)
        return self._comm.fetch(self.mine.q, tensors, dims, self._seen_by(None))

    def ask_keys(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Stage, Iterator[Arrived]]]:
        """Each stage with its number, and the keys and values of each group of heads, which have
        arrived when they are looked at; as many of the following ones as the Comm likes are on
        their way meanwhile."""
        groups, remote = self._share.groups(q, k), self.mine.remote
        waiting = deque([(n, kv, heads) for n, kv in remote for heads in groups])
        coming: deque[Pending] = deque()

        def ask() -> None:
            n, kv, heads = waiting.popleft()
            coming.append(self._comm.fetch(kv, [k, v], [heads.keys] * 2, self._seen_by(n)))

        def arriving(stage: Stage) -> Iterator[Arrived]:
            if stage.kv is None:
                yield self._share, *self._share.of_keys(k, v)
                return
            for heads in groups:
                here = coming.popleft()
                if waiting:
                    ask()
                keys, values = here.wait()
                self._last = None if coming else here
                yield heads, keys, values

        for _ in range(min(self._comm.ahead, len(waiting))):
            ask()
        return ((n, stage, arriving(stage)) for n, stage in enumerate(self.mine.stages))

    def guests_done(self, stage: int) -> bool:
        """Whether after this stage no rank attends rows of others any more, so that what was made
        of them goes home while further keys are attended; on all ranks at once, as they exchange in
        one order."""
        return self._plan.rows_move and stage + 1 == self._plan.guest_stages

    def send_home(
        self,
        results: Sequence[Tensor],
        into: Callable[[], Sequence[Tensor]],
        dims: Sequence[Dims],
        put: Put,
        dtype: torch.dtype | None = None,
        *,
        stage: int | None = None,
    ) -> Pending:
        """Send what was made of a stage's keys to where they are from; of rows if None. It may
        come over the last keys, as no other stage then has to wait until its peers are done."""
        exchange, seen_by = self._exchange(self.mine, stage), self._seen_by(stage)
        over = None if stage is None else self._last
        return self._comm.send_home(exchange, results, into, dims, put, dtype, seen_by, over)

    def _seen_by(self, stage: int | None) -> SeenBy:
        return lambda peer: self._exchange(self._plan.rank(peer), stage)

    @staticmethod
    def _exchange(of: RankPlan, stage: int | None) -> Exchange:
        exchange = of.q if stage is None else of.stages[stage].kv
        assert exchange is not None
        return exchange

    def forward(
        self,
        stage: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: HeadShard,
        *,
        guests: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """out and lse over the stage's keys, of the rows that attend some (a hull); ``heads`` are
        the share or a group of it, and q has those of the share."""
        if heads is not self._share:
            q = heads.of(q, heads.rows)
        rows, pairs, tokens = heads.call(stage, guests=guests, q=q, keys=keys)
        some_q = span_of(q, 1, *rows)
        return self._kernel.forward(some_q, keys, values, pairs, heads.scoring, tokens)

    def backward(
        self,
        stage: int,
        of_rows: Sequence[Tensor],
        keys: Tensor,
        values: Tensor,
        heads: HeadShard,
        *,
        guests: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq of these rows, dk, dv over the stage's keys, of ``heads`` as in :meth:`forward`;
        ``of_rows`` are dout, q, out, lse and, if it has a gradient, dlse, of the share."""
        if heads is not self._share:  # a group's of what has those of the share
            dims = [heads.rows] * 3 + [heads.stats] * (len(of_rows) - 3)
            of_rows = [heads.of(t, dim) for t, dim in zip(of_rows, dims, strict=True)]
        dout, q, out, lse, *dlse = of_rows
        (start, stop), pairs, tokens = heads.call(stage, guests=guests, q=q, keys=keys)
        given = BackwardOperands(
            span_of(dout, 1, start, stop),
            span_of(q, 1, start, stop),
            keys,
            values,
            span_of(out, 1, start, stop),
            span_of(lse, 2, start, stop),
            span_of(dlse[0], 2, start, stop) if dlse else None,
        )
        return self._kernel.backward(
            given, pairs, heads.scoring, tokens, deterministic=self._deterministic
        )


def _span(hull: Range, start: int = 0) -> slice:
    """A range of rows as counted from ``start``."""
    return slice(hull[0] - start, hull[1] - start)


def _dense(t: Tensor) -> Tensor:
    """Kernels want the last dim dense, and load 16 bytes at a time; other than that, strides are
    theirs to handle."""
    step = 16 // t.itemsize
    if t.is_contiguous() and not t.storage_offset() % step:
        return t
    aligned = not t.storage_offset() % step and all(s % step == 0 for s in t.stride()[:-1])
    if aligned and (t.stride(-1) == 1 or t.shape[-1] <= 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)
