"""Plans whose passes come again and again, and what they attend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

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

HEADS, DIM, V_DIM, BATCH = (4, 2), 8, 6, 2
SEEN, TIMES = 2, 6  # calls before one is recorded, and of a test

CAUSAL = AttnMask.dense(64, causal=True)
STRIPED = Layout.striped(64, 4, block=4)
SPLIT: dict[str, Any] = {"heads": HEADS, "assignment": "balanced"}
PLANS = {
    "zigzag": make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS),
    "gathered": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=0, **SPLIT),
    "staged": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=3, **SPLIT),
    "scattered": make_plan(CAUSAL, STRIPED, stages=1, heads=HEADS, assignment="owner"),
    "teams": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=1, team_size=2, **SPLIT),
    "groups of heads": make_plan(CAUSAL, STRIPED, stages=1, head_groups=2, **SPLIT),
    "rows of several ranks": make_plan(
        AttnMask.dense(4, 128),
        Layout.contiguous(4, 4),
        Layout.contiguous(128, 4),
        assignment="nearest",
    ),
    "uneven": make_plan(CAUSAL, Layout.from_sizes([7, 0, 30, 27]), heads=HEADS),
}


def kernel(name: str = "reference", *, recorded: bool = True) -> Any:
    """One that may be recorded, or may not."""
    module = KERNELS[name]
    made = SimpleNamespace(NAME=name, forward=module.forward, backward=module.backward)
    if recorded:
        made.watched, made.unproven_tapes = nullcontext, lambda: None
    return made


def draw(
    mask: AttnMask, seed: int, dtype: torch.dtype = torch.float64, v_dim: int = V_DIM
) -> list[Tensor]:
    """q, k, v, dout, Gaussian."""
    source = torch.Generator().manual_seed(seed)
    (h, g), q_len, k_len = HEADS, mask.q_len, mask.k_len
    sizes = [(q_len, h, DIM), (k_len, g, DIM), (k_len, g, v_dim), (q_len, h, v_dim)]
    return [
        torch.randn((BATCH, *s), dtype=torch.float64, generator=source).to(dtype) for s in sizes
    ]


def calls(
    plan: Plan,
    attends: Any,
    times: int = TIMES,
    own: Callable[[Tensor, int], Tensor] = lambda t, n: t,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[tuple[list[Tensor], tuple[int, int, int]]]:
    """Each rank's (out, lse, dq, dk, dv) of each of so many calls with data of their own, and what
    its Comm counted; ``own`` makes a rank's tensors of call n what it is given."""

    def body(comm: Comm) -> tuple[list[Tensor], tuple[int, int, int]]:
        results: list[Tensor] = []
        for n in range(times):
            q, k, v, dout = draw(plan.mask, n, dtype)
            mine = [plan.q_layout.shard(q, comm.rank), plan.q_layout.shard(dout, comm.rank)]
            mine += [plan.k_layout.shard(t, comm.rank) for t in (k, v)]
            q, dout, k, v = (own(t, n) for t in mine)
            scoring = Scoring(0.25)
            with comm.doing("a forward and a backward"):
                out, lse = attention_forward(plan, comm, attends, ForwardOperands(q, k, v), scoring)
                given = BackwardOperands(dout, q, k, v, out, lse)
                grads = attention_backward(plan, comm, attends, given, scoring, **options)
            results += [out, lse, *grads]
        counted = comm.counters
        return results, (counted.sent_bytes, counted.received_bytes, comm.arena_bytes)

    return run_ranks(plan.group_size, body)


def assert_alike(one: Any, other: Any) -> None:
    """Every result and every count is the same, to the bit."""
    for rank, ((a, counted_a), (b, counted_b)) in enumerate(zip(one, other, strict=True)):
        assert counted_a == counted_b, f"rank {rank} counts other bytes"
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"rank {rank}, result {n % 5} of call {n // 5}"
