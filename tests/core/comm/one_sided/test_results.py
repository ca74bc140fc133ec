"""Ranks that write into one another's memory against ranks that send messages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_sided_memory import InProcessOneSided, SparingOneSided
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan

from .passes import CAUSAL, HEADS, PLANS, connect, draw, one_pass, passes

NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_alike(one: Any, other: Any) -> None:
    """Every result and every count is the same, to the bit."""
    for rank, ((a, bytes_a), (b, bytes_b)) in enumerate(zip(one, other, strict=True)):
        assert bytes_a == bytes_b, f"rank {rank} counts other bytes"
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"rank {rank}, {NAMES[n % 5]} of pass {n // 5}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_results_are_those_of_messages(
    name: str,
    reduce_dtype: torch.dtype | None,
    kinds: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, got = PLANS[name], {}
    for kind, comm in kinds.items():
        connect(monkeypatch, comm)
        got[kind] = passes(plan, torch.float32, times=3, reduce_dtype=reduce_dtype)
    assert_alike(got["messages"], got["one-sided"])
    assert_alike(got["messages"], got["sparing"])


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("heads", "team_size", "ranks"),
    [((6, 3), 2, 4), ((4, 1), 4, 4), ((5, 5), 3, 3), ((6, 2), 4, 4)],
)
@pytest.mark.parametrize("stages", [0, 1])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_shares_of_any_size(
    heads: tuple[int, int],
    team_size: int,
    ranks: int,
    stages: int,
    reduce_dtype: torch.dtype | None,
    kinds: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of a team send and receive unlike many heads; one plan may serve other heads too."""
    options = {"heads": heads, "team_size": team_size, "assignment": "balanced"}
    got = {}
    plan = make_plan(CAUSAL, Layout.striped(64, ranks, block=4), stages=stages, **options)

    def body(comm: Comm) -> tuple[list[Tensor], tuple[int, int]]:
        results = []
        for seed, (h, g) in enumerate([heads, (heads[0], heads[0]), heads]):
            tensors = draw(CAUSAL, torch.float32, seed, (h, g))
            results += one_pass(plan, comm, tensors, dlse=0.5, reduce_dtype=reduce_dtype)
        return results, (comm.counters.sent_bytes, comm.counters.received_bytes)

    for kind, comm in kinds.items():
        connect(monkeypatch, comm)
        got[kind] = run_ranks(plan.group_size, body)
    assert_alike(got["messages"], got["one-sided"])
    assert_alike(got["messages"], got["sparing"])


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", [InProcessOneSided, SparingOneSided])
@pytest.mark.parametrize("name", PLANS)
def test_whoever_is_late(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that runs ahead never writes over what another still reads."""
    connect(monkeypatch, kind)
    plan = PLANS[name]
    first = passes(plan, torch.float32, times=4)
    for seed in range(3):

        def begin(comm: Any, seed: int = seed) -> None:
            comm.memory.late = random.Random(seed * 10 + comm.rank)

        assert_alike(first, passes(plan, torch.float32, times=4, begin=begin))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_plans_drawn_at_random(data: st.DataObject) -> None:
    """Several plans one after the other over one group: places shrink, grow and are used again."""
    ranks = data.draw(st.sampled_from([2, 3, 4]))
    plans = []
    for _ in range(data.draw(st.integers(1, 3))):
        length = data.draw(st.integers(1, 60))
        layouts = [Layout.zigzag(length, ranks), Layout.contiguous(length, ranks)]
        layouts.append(Layout.striped(length, ranks, block=data.draw(st.integers(1, 5))))
        plans.append(
            make_plan(
                AttnMask.dense(length, causal=data.draw(st.booleans())),
                data.draw(st.sampled_from(layouts)),
                stages=data.draw(st.integers(0, 3)),
                assignment=data.draw(st.sampled_from(["owner", "balanced"])),
                heads=HEADS,
            )
        )

    def body(comm: Comm) -> list[Tensor]:
        results = []
        for n, plan in enumerate([*plans, *plans]):
            results += one_pass(plan, comm, draw(plan.mask, torch.float64, n))
        return results

    want = run_ranks(ranks, body)
    for kind in (InProcessOneSided, SparingOneSided):
        with pytest.MonkeyPatch.context() as patch:
            connect(patch, kind)
            got = run_ranks(ranks, body)
        for a, b in zip(want, got, strict=True):
            assert all(map(torch.equal, a, b))
