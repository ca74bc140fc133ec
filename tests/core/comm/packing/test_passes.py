"""Passes whose messages are packed together, apart, or some this way and some that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.packing import forms, parcels
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.topology import Topology

MASK = AttnMask.varlen([0, 3, 4, 60, 66, 67, 79, 118, 120], causal=True)
PLANS: dict[str, dict[str, Any]] = {
    "owner": {"assignment": "owner"},
    "rows move": {"assignment": "balanced"},
    "two steps": {"assignment": "owner", "stages": 2},
    "groups of heads": {"assignment": "owner", "head_groups": 2},
    "teams": {"team_size": 2},
}
CAUSAL = AttnMask.causal(120)
CASES = {
    "contiguous": (MASK, Layout.contiguous(120, 4)),
    "striped": (MASK, Layout.striped(120, 4)),
    "uneven": (MASK, Layout.from_sizes([50, 0, 11, 59])),
    "zigzag": (CAUSAL, Layout.zigzag(120, 4)),  # of a received buffer, some is already in order
}


def results(
    mask: AttnMask, layout: Layout, how: dict[str, Any], hosts: tuple[int, ...], batch: int
) -> list[list[Any]]:
    """out, lse, dq, dk and dv of each rank."""
    costs = replace(H200_NCCL, topology=Topology(hosts) if len(hosts) > 1 else None)
    plan = make_plan(mask, layout, heads=(4, 2), costs=costs, **how)
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(batch, 120, h, 8, generator=draw).double() for h in (4, 2, 2, 4)]

    def passes(comm: Comm) -> list[torch.Tensor]:
        q, k, v, dout = (layout.shard(t, comm.rank, dim=1) for t in whole)
        kernel, scoring = KERNELS["torch"], Scoring(0.3)
        out, lse = attention_forward(plan, comm, kernel, ForwardOperands(q, k, v), scoring)
        given = BackwardOperands(dout, q, k, v, out, lse)
        grads = attention_backward(plan, comm, kernel, given, scoring)
        return [out, lse.transpose(1, 2), *grads]

    return run_ranks(layout.group_size, passes)


@pytest.mark.thin(8)
@pytest.mark.parametrize("small_bytes", [0, 700, 2500, 1 << 20])
@pytest.mark.parametrize("hosts", [(4,), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_device(
    name: str,
    batch: int,
    how: str,
    hosts: tuple[int, ...],
    small_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "teams" and hosts == (1, 3):
        pytest.skip("a team is on one host")
    monkeypatch.setattr(forms, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(parcels, "form_of", forms.Form)  # plans keep forms from call to call
    mask, layout = CASES[name]
    [alone] = results(mask, Layout.contiguous(120, 1), {}, (1,), batch)
    for rank, found in enumerate(results(mask, layout, PLANS[how], hosts, batch)):
        for got, want in zip(found, alone, strict=True):
            error = (got - layout.shard(want, rank, dim=1)).nan_to_num(0.0, 0.0, 0.0).abs()
            assert error.max().item() <= 1e-10 if error.numel() else True
