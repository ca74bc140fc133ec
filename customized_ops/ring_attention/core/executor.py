"""Runs a rank's plan: the one implementation of every distributed attention pattern here.

Forward                                      Backward, the same plan reversed
1. ask for the rows this rank computes       1. the rows' q, dout, out and lse travel
   for others (guests) and the first keys    2. each stage: fetch keys, add up dq, send dk and dv
2. each stage: ask for the next stage's         home, where they are added up
   keys, attend this stage's, merge          3. dq of guest rows goes home
3. send guests' out and lse home, where
   results of one row are merged

A rank computes its share of the heads only, where the plan splits them.
Kept between the two: q, k, v, out and lse of the rank's own tokens, nothing that was received.

Numerics; "wide" is fp32, or fp64 beside fp64 inputs:

    kernels      compute wide inside and may round each result of a call to the inputs' dtype once
    out, lse     merged wide over stages and ranks, rounded once at the end; lse stays wide
    out of guests   travels in q's dtype, as a kernel would have rounded it; lse wide
    dq, dk, dv   added up wide over stages and ranks, rounded once at the end
    dk, dv of received keys, dq of guests   travel in ``reduce_dtype``, by default wide, and are
                 added wide where they arrive; what a rank holds itself is not rounded to it

What arrives is added or merged in rank order, so nothing here depends on who was first: the forward
is the same bit for bit from run to run, the backward where the kernel's is (``deterministic``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import ROWS, STATS, Comm, Pending, add, place
from .exchange import Exchange
from .kernels import Kernel, Pairs, Scoring, Tokens
from .merge import Accumulator, Sum, accumulation_dtype, merge_
from .plan import Plan
from .rank_plan import RankPlan, Stage
from .share import Share


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
    mine = plan.rank(comm.rank)
    share = Share(plan, comm.rank, q, scoring, key_positions)
    calls = _Calls(kernel, share)
    q, k, v = (_dense(t) for t in (q, k, v))
    guests = comm.fetch(mine.q, [q], [ROWS])
    own_q, own, guest = share.of(q), Accumulator(), Accumulator()
    guest_q: Tensor | None = None
    for n, stage, keys, values in _stages(mine, comm, share, k, v):
        if len(stage.own):
            own.add(*calls.forward(n, own_q, keys, values, guests=False))
        if guest_q is None:
            (guest_q,) = guests.wait()
        if len(stage.guest):
            guest.add(*calls.forward(n, guest_q, keys, values, guests=True))
    assert guest_q is not None, "a plan has at least one stage"
    home_dtype = accumulation_dtype(q.dtype) if mine.shared_rows else q.dtype
    out, lse = own.result(own_q, v.shape[-1], home_dtype)
    if not share.whole:
        out, lse = share.among_all(out, lse, q, v.shape[-1])
    if not mine.q.empty:
        results = guest.result(guest_q, v.shape[-1], q.dtype)
        put = _merge if mine.shared_rows else place
        comm.send_home(mine.q, results, (out, lse), (ROWS, STATS), put).wait()
    return out.to(q.dtype), lse


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
        reduce_dtype: what gradients travel in, the same on every rank; None is fp32, fp64 for fp64.
    """
    mine = plan.rank(comm.rank)
    share = Share(plan, comm.rank, q, scoring, key_positions)
    calls = _Calls(kernel, share, deterministic)
    wire = reduce_dtype or accumulation_dtype(q.dtype)
    dout, q, k, v, out = (_dense(t) for t in (dout, q, k, v, out))
    rows = [(dout, ROWS), (q, ROWS), (out, ROWS), (lse, STATS)]
    rows += [] if dlse is None else [(dlse, STATS)]
    guests = comm.fetch(mine.q, *zip(*rows, strict=True))
    own_rows = [share.of(t, dims) for t, dims in rows]
    guest_rows: list[Tensor] | None = None
    dq, dk, dv = (Sum(t) for t in (q, k, v))
    guest_dq: Sum | None = None
    going_home: list[Pending | None] = []
    for n, stage, keys, values in _stages(mine, comm, share, k, v):
        of_keys: list[list[Tensor]] = []
        if len(stage.own):
            part, *both = calls.backward(n, own_rows, keys, values, guests=False)
            share.add(dq, part)
            of_keys.append(both)
        if guest_rows is None or guest_dq is None:
            guest_rows = guests.wait()
            guest_dq = Sum(guest_rows[1])
        if len(stage.guest):
            part, *both = calls.backward(n, guest_rows, keys, values, guests=True)
            guest_dq.add(part)
            of_keys.append(both)
        going_home.append(
            _key_gradients(comm, share, stage.kv, (keys, values), of_keys, (dk, dv), wire)
        )
    if not mine.q.empty:
        assert guest_dq is not None, "a plan has at least one stage"
        going_home.append(
            comm.send_home(mine.q, [guest_dq.so_far()], [dq.wide()], [ROWS], add, wire)
        )
    for pending in going_home:
        if pending is not None:
            pending.wait()
    return dq.result(), dk.result(), dv.result()


@dataclass(frozen=True)
class _Calls:
    """Calls of a rank's kernel, each for one stage and for own rows or guests."""

    kernel: Kernel
    share: Share
    deterministic: bool = False

    def forward(
        self, stage: int, q: Tensor, keys: Tensor, values: Tensor, *, guests: bool
    ) -> tuple[Tensor, Tensor]:
        """out and lse of these rows over the stage's keys."""
        pairs, tokens = self._which(stage, q, keys, guests)
        return self.kernel.forward(q, keys, values, pairs, self.share.scoring, tokens)

    def backward(
        self, stage: int, rows: Sequence[Tensor], keys: Tensor, values: Tensor, *, guests: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these rows over the stage's keys; ``rows`` are dout, q, out, lse and, if
        it has a gradient, dlse."""
        dout, q, out, lse, *dlse = rows
        pairs, tokens = self._which(stage, q, keys, guests)
        return self.kernel.backward(
            dout,
            q,
            keys,
            values,
            out,
            lse,
            pairs,
            self.share.scoring,
            tokens,
            dlse=dlse[0] if dlse else None,
            deterministic=self.deterministic,
        )

    def _which(
        self, stage: int, q: Tensor, keys: Tensor, guests: bool
    ) -> tuple[Pairs, Tokens | None]:
        pairs = self.share.pairs(stage, guests=guests, q_len=q.shape[1], k_len=keys.shape[1])
        return pairs, self.share.tokens(stage, guests=guests)


def _key_gradients(
    comm: Comm,
    share: Share,
    kv: Exchange | None,
    keys: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    totals: Sequence[Sum],
    wire: torch.dtype,
) -> Pending | None:
    """Add up what a stage's kernel calls made of dk and dv, and send what belongs to others home.

    Args:
        kv: how the stage's ``keys`` (k and v) came; None where they are the rank's own.
        parts: (dk, dv) of each call. totals: dk and dv of the rank's own keys.
        wire: the dtype to send in.
    """
    if kv is None:
        for part in parts:
            for total, each in zip(totals, part, strict=True):
                share.add(total, each)
        return None
    sums = [Sum(t) for t in keys]
    for part in parts:
        for total, each in zip(sums, part, strict=True):
            total.add(each)
    if kv.empty:
        return None
    places = [total.wide() for total in totals]
    return comm.send_home(kv, [t.so_far() for t in sums], places, (ROWS, ROWS), add, wire)


def _stages(
    mine: RankPlan, comm: Comm, share: Share, k: Tensor, v: Tensor
) -> Iterator[tuple[int, Stage, Tensor, Tensor]]:
    """Each stage with its number, keys and values; the next stage's are on their way meanwhile."""

    def ask(n: int) -> Pending | None:
        stage = mine.stages[n] if n < len(mine.stages) else None
        if stage is None or stage.kv is None:
            return None
        return comm.fetch(stage.kv, [k, v], [ROWS, ROWS])

    coming = ask(0)
    for n, stage in enumerate(mine.stages):
        here, coming = coming, ask(n + 1)
        keys, values = (share.of(k), share.of(v)) if here is None else here.wait()
        yield n, stage, keys, values


def _merge(places: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Merge an arrived (out, lse) into what is there."""
    merge_(*places, *parts)


def _dense(t: Tensor) -> Tensor:
    """Kernels want the last dim dense, and load 16 bytes at a time; other than that, strides are
    theirs to handle."""
    step = 16 // t.itemsize
    whole = t.is_contiguous() or all(stride % step == 0 for stride in t.stride()[:-1])
    if whole and t.storage_offset() % step == 0 and (t.stride(-1) == 1 or t.shape[-1] <= 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)
