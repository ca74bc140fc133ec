"""All indices of a batch travel to a device in one copy, for all layers and both passes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import recipe_kernel
import torch
from one_sided_memory import InProcessOneSided

from customized_ops.ring_attention.core import index_table
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, run_ranks
from customized_ops.ring_attention.core.comm.packing import parcels
from customized_ops.ring_attention.core.index_table import IndexTable
from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.kernels.window import library_calls
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.run import rank_heads
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.topology import Topology

MASK = AttnMask.varlen([0, 3, 4, 44, 50, 51, 63, 70, 90], causal=True)
SLOW_KERNELS = CostModel(forward_flops=1e6, backward_flops=1e6, call_seconds=0.0)
LAYOUTS = {
    "contiguous": Layout.contiguous(90, 3),
    "balanced": Layout.balanced(MASK, 3),
    "striped": Layout.striped(90, 3, 4),
    "zigzag": Layout.zigzag(90, 3, [0, 3, 4, 44, 50, 51, 63, 70, 90]),
    "one rank": Layout.contiguous(90, 1),
}
LAYERS = 2


def train(plan: Plan, comm: Comm) -> None:
    """Some layers forward, and backward."""
    draw = torch.Generator().manual_seed(comm.rank)
    rows = plan.q_layout.sizes[comm.rank]
    q, k, v, dout = (torch.randn(1, rows, 4, 8, generator=draw).double() for _ in range(4))
    results = []
    for _ in range(LAYERS):
        given = ForwardOperands(q, k, v)
        results.append(attention_forward(plan, comm, recipe_kernel, given, Scoring(0.3)))
    for out, lse in reversed(results):
        given_back = BackwardOperands(dout, q, k, v, out, lse)
        attention_backward(plan, comm, recipe_kernel, given_back, Scoring(0.3))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread of each copy; tables of sums are read as on a GPU."""
    found: list[int] = []
    send = index_table.send

    def counted(tables: Iterable[IndexTable], device: torch.device) -> None:
        tables = list(tables)
        if any(device not in table._on for table in tables):
            found.append(threading.get_ident())
        send(tables, device)

    def read(parts: Any, totals: Any, dims: Any, tables: Iterable[IndexTable], most: int) -> bool:
        for table in tables:
            table.on(parts[0].device)
        return False

    for module in (index_table, rank_heads, library_calls):
        monkeypatch.setattr(module, "send", counted)
    monkeypatch.setattr(parcels, "sum_rows", read)
    return found


@pytest.mark.parametrize("comm", [InProcessComm, InProcessOneSided], ids=["messages", "one-sided"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Layout.balanced")
def test_one_copy_for_each_rank(
    layout: str, comm: type[Comm], copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "InProcessComm", comm)
    where = LAYOUTS[layout]
    plan = make_plan(MASK, where, heads=(4, 4), costs=SLOW_KERNELS)
    # A process of its own has a plan of its own.
    of_ranks = [replace(plan, made={}, _ranks={}, _exchanges={}) for _ in plan.q_layout.sizes]
    run_ranks(where.group_size, lambda comm: train(of_ranks[comm.rank], comm))
    assert len(copies) == len(set(copies)) <= where.group_size
    assert copies, "packed calls have tables"


@pytest.mark.parametrize(
    "how", [{"assignment": "owner"}, {"team_size": 2}], ids=["relays", "teams"]
)
@pytest.mark.parametrize("layout", [Layout.striped(90, 4), Layout.contiguous(90, 4)], ids=str)
def test_one_copy_over_hosts(layout: Layout, how: dict[str, Any], copies: list[int]) -> None:
    costs = replace(SLOW_KERNELS, topology=Topology((2, 2)))
    plan = make_plan(MASK, layout, heads=(4, 4), costs=costs, **how)
    of_ranks = [replace(plan, made={}, _ranks={}, _exchanges={}) for _ in range(4)]
    run_ranks(4, lambda comm: train(of_ranks[comm.rank], comm))
    assert len(copies) == len(set(copies)) <= 4
    assert copies, "packed calls have tables"
