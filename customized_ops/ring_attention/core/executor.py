"""Runs a rank's plan: the one implementation of every distributed attention pattern here.

Forward                                      Backward, the same plan reversed
1. ask for the rows this rank computes       1. the rows' q, dout, out and lse travel
   for others (guests) and the first keys    2. each stage: fetch keys, add up dq, send dk and dv
2. each stage: ask for the next stage's         home, where they are added up
   keys, attend this stage's, merge          3. dq of guest rows goes home
3. send guests' out and lse home

Kept between the two: q, k, v, out and lse of the rank's own tokens, nothing that was received.
Sums over stages and ranks are fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .comm import Comm, Pending
from .kernels import Kernel
from .merge import Accumulator, accumulation_dtype
from .plan import Plan
from .rank_plan import RankPlan, Stage

TOKENS, LSE_TOKENS = 1, 2  # token dims of [b, l, h, d] and [b, h, l]


def attention_forward(
    plan: Plan, comm: Comm, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows.

    Args:
        q: [b, l, h, d], k: [b, m, g, d], v: [b, m, g, e]: this rank's tokens, as the plan's layouts
            say; h is a multiple of g.
        softmax_scale: what scores are multiplied by.
    Returns:
        out [b, l, h, e] in q's dtype and lse [b, h, l].
    """
    mine = plan.rank(comm.rank)
    q, k, v = (_dense(t) for t in (q, k, v))
    guests = comm.fetch(mine.q, [q], [TOKENS])
    own, guest = Accumulator(), Accumulator()
    guest_q: Tensor | None = None
    for stage, keys, values in _stages(mine, comm, k, v):
        if len(stage.own):
            own.add(*kernel.forward(q, keys, values, stage.own, softmax_scale))
        if guest_q is None:
            (guest_q,) = guests.wait()
        if len(stage.guest):
            guest.add(*kernel.forward(guest_q, keys, values, stage.guest, softmax_scale))
    assert guest_q is not None, "a plan has at least one stage"
    out, lse = own.result(q, v.shape[-1])
    if not mine.q.empty:
        results = guest.result(guest_q, v.shape[-1])
        comm.give(mine.q, results, (out, lse), (TOKENS, LSE_TOKENS)).wait()
    return out, lse


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
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for this rank's q, k, v; ``out`` and ``lse`` are what the forward returned."""
    mine = plan.rank(comm.rank)
    dout, q, k, v, out = (_dense(t) for t in (dout, q, k, v, out))
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    rows = (dout, q, out, lse)
    dims = (TOKENS, TOKENS, TOKENS, LSE_TOKENS)
    guests = comm.fetch(mine.q, rows, dims)
    guest_rows: list[Tensor] = []
    guest_dq: Tensor | None = None
    going_home: list[Pending] = []
    for stage, keys, values in _stages(mine, comm, k, v):
        if guest_dq is None:
            guest_rows = guests.wait()
            guest_dq = torch.zeros_like(guest_rows[1], dtype=wide)
        remote = stage.kv is not None
        dkeys = torch.zeros_like(keys, dtype=wide) if remote else dk
        dvalues = torch.zeros_like(values, dtype=wide) if remote else dv
        for slices, total, block in ((stage.own, dq, rows), (stage.guest, guest_dq, guest_rows)):
            if len(slices):
                block_dout, block_q, block_out, block_lse = block
                parts = kernel.backward(
                    block_dout, block_q, keys, values, block_out, block_lse, slices, softmax_scale
                )
                for sum_, part in zip((total, dkeys, dvalues), parts, strict=True):
                    sum_ += part
        if stage.kv is not None:
            back = comm.reduce(stage.kv, (dkeys, dvalues), (dk, dv), (TOKENS, TOKENS))
            going_home.append(back)
    if not mine.q.empty:
        assert guest_dq is not None
        going_home.append(comm.give(mine.q, (guest_dq,), (dq,), (TOKENS,)))
    for pending in going_home:
        pending.wait()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _stages(
    mine: RankPlan, comm: Comm, k: Tensor, v: Tensor
) -> Iterator[tuple[Stage, Tensor, Tensor]]:
    """Each stage with its keys and values; the next stage's are on their way meanwhile."""

    def ask(n: int) -> Pending | None:
        stage = mine.stages[n] if n < len(mine.stages) else None
        if stage is None or stage.kv is None:
            return None
        return comm.fetch(stage.kv, [k, v], [TOKENS, TOKENS])

    coming = ask(0)
    for n, stage in enumerate(mine.stages):
        here, coming = coming, ask(n + 1)
        keys, values = (k, v) if here is None else here.wait()
        yield stage, keys, values


def _dense(t: Tensor) -> Tensor:
    """Kernels want the last dim dense; any other stride is theirs to handle."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()
