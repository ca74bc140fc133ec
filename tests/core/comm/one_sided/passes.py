"""Passes over ranks that write to one another's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward

HEADS, DIM, V_DIM, BATCH = (4, 2), 16, 8, 2


def connect(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Let ranks in this process be connected so."""
    monkeypatch.setattr(inprocess, "InProcessComm", kind)


def passes(
    plan: Plan,
    dtype: torch.dtype,
    times: int = 1,
    begin: Callable[[Comm], None] = lambda comm: None,
    kernel: Any = KERNELS["reference"],
    **options: Any,
) -> list[tuple[list[Tensor], tuple[int, int]]]:
    """Each rank's (out, lse, dq, dk, dv) of each of ``times`` passes, and its counted bytes."""

    def body(comm: Comm) -> tuple[list[Tensor], tuple[int, int]]:
        begin(comm)
        results = []
        for seed in range(times):
            results += one_pass(plan, comm, draw(plan.mask, dtype, seed), kernel, **options)
        return results, (comm.counters.sent_bytes, comm.counters.received_bytes)

    return run_ranks(plan.group_size, body)


def one_pass(
    plan: Plan,
    comm: Comm,
    tensors: list[Tensor],
    kernel: Any = KERNELS["reference"],
    dlse: float | None = None,
    **options: Any,
) -> list[Tensor]:
    """A rank's out, lse, dq, dk, dv of whole q, k, v, dout, with this gradient of all its lse."""
    layouts = plan.q_layout, plan.k_layout, plan.k_layout, plan.q_layout
    *own, own_dout = (at.shard(t, comm.rank) for at, t in zip(layouts, tensors, strict=True))
    scoring = Scoring(0.25)
    out, lse = attention_forward(plan, comm, kernel, ForwardOperands(*own), scoring)
    of_lse = None if dlse is None else torch.full_like(lse, dlse)
    given = BackwardOperands(own_dout, *own, out, lse, of_lse)
    return [out, lse, *attention_backward(plan, comm, kernel, given, scoring, **options)]


def draw(
    mask: AttnMask, dtype: torch.dtype, seed: int, heads: tuple[int, int] = HEADS
) -> list[Tensor]:
    """q, k, v, dout, Gaussian."""
    source = torch.Generator().manual_seed(seed)
    (h, g), q_len, k_len = heads, mask.q_len, mask.k_len
    sizes = [(q_len, h, DIM), (k_len, g, DIM), (k_len, g, V_DIM), (q_len, h, V_DIM)]
    return [
        torch.randn((BATCH, *s), dtype=torch.float64, generator=source).to(dtype) for s in sizes
    ]


CAUSAL = AttnMask.dense(64, causal=True)
FEW_ROWS = AttnMask.dense(4, 128)
SPLIT = {"heads": HEADS, "assignment": "balanced"}
STRIPED = Layout.striped(64, 4, block=4)
PLANS = {
    "zigzag": make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS),
    "gathered": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=0, **SPLIT),
    "staged": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=3, **SPLIT),
    "scattered": make_plan(CAUSAL, STRIPED, stages=1, heads=HEADS, assignment="owner"),
    "teams": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=1, team_size=2, **SPLIT),
    "groups of heads": make_plan(
        CAUSAL, STRIPED, stages=1, heads=HEADS, assignment="balanced", head_groups=2
    ),
    "gathered in groups": make_plan(
        CAUSAL, Layout.contiguous(64, 3), stages=0, heads=HEADS, head_groups=2
    ),
    "rows of several ranks": make_plan(
        FEW_ROWS, Layout.contiguous(4, 4), Layout.contiguous(128, 4), assignment="nearest"
    ),
    "nothing moves": make_plan(AttnMask.varlen([0, 32, 64], causal=True), Layout.contiguous(64, 2)),
}
