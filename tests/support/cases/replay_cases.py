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
from customized_ops.ring_attention.core.merge.merge import accumulation_dtype
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.tape import allocate, launch

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
    attend, attend_backward = KERNELS[name].forward, KERNELS[name].backward

    def forward(given: ForwardOperands, *options: Any) -> Any:
        q, _, v = given
        b, rows, h, _ = q.shape
        wide = accumulation_dtype(q.dtype)
        shapes = (b, rows, h, v.shape[-1]), (b, h, rows)
        results = [allocate(q.new_empty, shape, dtype=wide) for shape in shapes]
        launch(_write, attend, options, {}, *results, *given)
        return results

    def backward(given: BackwardOperands, *options: Any, **named: Any) -> Any:
        wide = accumulation_dtype(given.q.dtype)
        results = [allocate(torch.empty_like, t, dtype=wide) for t in given[1:4]]
        launch(_write, attend_backward, options, named, *results, *given)
        return results

    made = SimpleNamespace(NAME=name, forward=forward, backward=backward)
    if recorded:
        made.watched, made.unproven_tapes = nullcontext, lambda: None
    return made


def _write(function: Any, options: Any, named: Any, *tensors: Any) -> None:
    """Stands for a launch that writes the results of a function of a kernel."""
    forward = len(tensors) == 5
    results, given = (tensors[:2], tensors[2:]) if forward else (tensors[:3], tensors[3:])
    operands = ForwardOperands(*given) if forward else BackwardOperands(*given)
    for result, made in zip(results, function(operands, *options, **named), strict=True):
        assert result.dtype == made.dtype
        result.copy_(made)


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
