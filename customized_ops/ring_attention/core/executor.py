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
Sums over stages and ranks are fp32 (fp64 for fp64 inputs); a guest row's out travels in q's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .comm import ROWS, STATS, Comm, Pending, add, place
from .kernels import Kernel, Scoring
from .merge import Accumulator, accumulation_dtype, merge_
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
    q, k, v = (_dense(t) for t in (q, k, v))
    guests = comm.fetch(mine.q, [q], [ROWS])
    own_q, own, guest = share.of(q), Accumulator(), Accumulator()
    guest_q: Tensor | None = None
    for n, stage, keys, values in _stages(mine, comm, share, k, v):
        if len(stage.own):
            where = share.tokens(n, guests=False)
            own.add(*kernel.forward(own_q, keys, values, stage.own, share.scoring, where))
        if guest_q is None:
            (guest_q,) = guests.wait()
        if len(stage.guest):
            where = share.tokens(n, guests=True)
            guest.add(*kernel.forward(guest_q, keys, values, stage.guest, share.scoring, where))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for this rank's q, k, v; ``out`` and ``lse`` are what the forward returned."""
    mine = plan.rank(comm.rank)
    share = Share(plan, comm.rank, q, scoring, key_positions)
    dout, q, k, v, out = (_dense(t) for t in (dout, q, k, v, out))
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    guests = comm.fetch(mine.q, (dout, q, out, lse), (ROWS, ROWS, ROWS, STATS))
    own_rows = [share.of(dout), share.of(q), share.of(out), share.of(lse, STATS)]
    guest_rows: list[Tensor] = []
    guest_dq: Tensor | None = None
    going_home: list[Pending] = []
    for n, stage, keys, values in _stages(mine, comm, share, k, v):
        if guest_dq is None:
            guest_rows = guests.wait()
            guest_dq = torch.zeros_like(guest_rows[1], dtype=wide)
        remote = stage.kv is not None
        dkeys = torch.zeros_like(keys, dtype=wide) if remote else share.of(dk)
        dvalues = torch.zeros_like(values, dtype=wide) if remote else share.of(dv)
        blocks = ((stage.own, share.of(dq), own_rows), (stage.guest, guest_dq, guest_rows))
        for slices, total, rows in blocks:
            if len(slices):
                block_dout, block_q, block_out, block_lse = rows
                where = share.tokens(n, guests=rows is guest_rows)
                parts = kernel.backward(
                    block_dout,
                    block_q,
                    keys,
                    values,
                    block_out,
                    block_lse,
                    slices,
                    share.scoring,
                    where,
                )
                for sum_, part in zip((total, dkeys, dvalues), parts, strict=True):
                    sum_ += part
        if stage.kv is not None:
            back = comm.send_home(stage.kv, (dkeys, dvalues), (dk, dv), (ROWS, ROWS), add)
            going_home.append(back)
    if not mine.q.empty:
        assert guest_dq is not None
        going_home.append(comm.send_home(mine.q, (guest_dq,), (dq,), (ROWS,), add))
    for pending in going_home:
        pending.wait()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


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
    """Kernels want the last dim dense; any other stride is theirs to handle."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()
