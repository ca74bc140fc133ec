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
    q, k, v = (_dense(t) for t in (q, k, v))
    guests = comm.fetch(mine.q, [q], [ROWS])
    own_q, own, guest = share.of(q), Accumulator(), Accumulator()
    guest_q: Tensor | None = None
    for n, stage, keys, values in _stages(mine, comm, share, k, v):
        if len(stage.own):
            pairs = share.pairs(n, guests=False, q_len=own_q.shape[1], k_len=keys.shape[1])
            where = share.tokens(n, guests=False)
            own.add(*kernel.forward(own_q, keys, values, pairs, share.scoring, where))
        if guest_q is None:
            (guest_q,) = guests.wait()
        if len(stage.guest):
            pairs = share.pairs(n, guests=True, q_len=guest_q.shape[1], k_len=keys.shape[1])
            where = share.tokens(n, guests=True)
            guest.add(*kernel.forward(guest_q, keys, values, pairs, share.scoring, where))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for this rank's q, k, v; ``out`` and ``lse`` are what the forward returned.

    Args:
        dlse: [b, h, l], the gradient of lse; None on every rank of a call, or on none.
        deterministic: whether gradients must be the same bit for bit from run to run.
    """
    mine = plan.rank(comm.rank)
    share = Share(plan, comm.rank, q, scoring, key_positions)
    dout, q, k, v, out = (_dense(t) for t in (dout, q, k, v, out))
    sums = [Sum(t) for t in (q, k, v)]
    rows = [(dout, ROWS), (q, ROWS), (out, ROWS), (lse, STATS)]
    rows += [(dlse, STATS)] if dlse is not None else []
    guests = comm.fetch(mine.q, *zip(*rows, strict=True))
    own_rows = [share.of(t, dims) for t, dims in rows]
    guest_rows: list[Tensor] | None = None
    guest_dq: Sum | None = None
    going_home: list[Pending] = []
    for n, stage, keys, values in _stages(mine, comm, share, k, v):
        if guest_rows is None:
            guest_rows = guests.wait()
            guest_dq = Sum(guest_rows[1])
        received = None if stage.kv is None else (Sum(keys), Sum(values))
        blocks = ((stage.own, own_rows, sums[0]), (stage.guest, guest_rows, guest_dq))
        for slices, (block_dout, block_q, block_out, block_lse, *block_dlse), dq in blocks:
            if not len(slices):
                continue
            guest = dq is guest_dq
            pairs = share.pairs(n, guests=guest, q_len=block_q.shape[1], k_len=keys.shape[1])
            parts = kernel.backward(
                block_dout,
                block_q,
                keys,
                values,
                block_out,
                block_lse,
                pairs,
                share.scoring,
                share.tokens(n, guests=guest),
                dlse=block_dlse[0] if block_dlse else None,
                deterministic=deterministic,
            )
            whole = dq, *(received or sums[1:])
            own_heads = not guest, received is None, received is None
            for total, part, narrow in zip(whole, parts, own_heads, strict=True):
                if narrow and not share.whole:
                    share.of(total.wide()).add_(part)
                else:
                    total.add(part)
        if stage.kv is not None and received is not None:
            parts_home = [part.wide() for part in received]
            own_places = [total.wide() for total in sums[1:]]
            back = comm.send_home(stage.kv, parts_home, own_places, (ROWS, ROWS), add)
            going_home.append(back)
    if not mine.q.empty:
        assert guest_dq is not None
        home = comm.send_home(mine.q, (guest_dq.wide(),), (sums[0].wide(),), (ROWS,), add)
        going_home.append(home)
    for pending in going_home:
        pending.wait()
    dq, dk, dv = (total.result() for total in sums)
    return dq, dk, dv


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
