"""Plans with results of several ranks in every way, and a run of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm
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

SCALE = 0.25
HEADS, DIM, V_DIM = (4, 2), 16, 8


class Rounding:
    """A kernel that rounds all but lse to the inputs' dtype, as those of GPUs do."""

    @staticmethod
    def forward(given: ForwardOperands, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = KERNELS["reference"].forward(given, *rest)
        return out.to(given.q.dtype), lse

    @staticmethod
    def backward(given: BackwardOperands, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(
            t.to(given.dout.dtype) for t in KERNELS["reference"].backward(given, *rest, **options)
        )


KERNEL = {"wide": KERNELS["reference"], "rounding": Rounding}


def draw(mask: AttnMask, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, Gaussian, batch 2."""
    source = torch.Generator().manual_seed(0)
    (h, g), q_len, k_len = HEADS, mask.q_len, mask.k_len
    sizes = [(q_len, h, DIM), (k_len, g, DIM), (k_len, g, V_DIM), (q_len, h, V_DIM)]
    return [
        torch.randn((2, *size), dtype=torch.float64, generator=source).to(dtype) for size in sizes
    ]


def run(
    plan: Plan,
    tensors: list[Tensor],
    kernel: Any = KERNEL["wide"],
    begin: Callable[[Comm], None] = lambda comm: None,
    lse_gradient: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[list[int]]]:
    """(out, lse, dq, dk, dv) of the whole sequence, and the bytes that each rank sent and received
    in the backward; ``begin`` is called on each rank first."""
    q, k, v, dout = tensors

    def body(comm: Comm) -> tuple[list[Tensor], list[int]]:
        begin(comm)
        own = [plan.q_layout.shard(q, comm.rank)]
        own += [plan.k_layout.shard(t, comm.rank) for t in (k, v)]
        own_dout = plan.q_layout.shard(dout, comm.rank)
        out, lse = attention_forward(plan, comm, kernel, ForwardOperands(*own), Scoring(SCALE))
        dlse = torch.ones_like(lse) if lse_gradient else None
        before = np.array([comm.counters.sent_bytes, comm.counters.received_bytes])
        given = BackwardOperands(own_dout, *own, out, lse, dlse)
        grads = attention_backward(plan, comm, kernel, given, Scoring(SCALE), **options)
        after = np.array([comm.counters.sent_bytes, comm.counters.received_bytes])
        return [out, lse, *grads], (after - before).tolist()

    ranks, moved = zip(*run_ranks(plan.group_size, body), strict=True)
    where = [(plan.q_layout, 1), (plan.q_layout, 2), (plan.q_layout, 1), *[(plan.k_layout, 1)] * 2]
    whole = [layout.unshard([r[n] for r in ranks], dim) for n, (layout, dim) in enumerate(where)]
    return whole, list(moved)


CAUSAL = AttnMask.dense(64, causal=True)
FEW_ROWS = AttnMask.dense(4, 128)
SPLIT = {"heads": HEADS, "assignment": "balanced"}


def few_rows(**options: Any) -> Plan:
    """Rows go to the keys, and several ranks' results of a row are merged."""
    layouts = Layout.contiguous(4, 4), Layout.contiguous(128, 4)
    return make_plan(FEW_ROWS, *layouts, assignment="nearest", heads=HEADS, **options)


PLANS = {
    "gathered": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=0, **SPLIT),
    "staged": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=3, **SPLIT),
    "teams": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=1, team_size=2, **SPLIT),
    "gathered by teams": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=0, team_size=2, **SPLIT),
    "shared": make_plan(
        CAUSAL, Layout.contiguous(64, 4), stages=1, assignment="shared", heads=HEADS
    ),
    "rows of several ranks": few_rows(),
    "rows of several teams": few_rows(team_size=2, stages=1),
}
over_plans = pytest.mark.parametrize("name", PLANS)
