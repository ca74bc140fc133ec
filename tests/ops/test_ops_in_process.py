"""The attention ops on in-process ranks against dense attention on one device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense import assert_same
from op_cases import Case, check_dense, check_rounding, expected, run_rank, same
from op_table import TABLE, UNEVEN

from customized_ops.ring_attention import wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import plan as plans
from customized_ops.ring_attention.core.plan.choose.plan_request import PlanRequest
from customized_ops.ring_attention.op.arguments import ArgumentError
from customized_ops.ring_attention.op.call import TensorSpec


def test_the_check_can_fail() -> None:
    want = expected(TABLE["causal"])
    with pytest.raises(AssertionError, match="dv: error"):
        same([*want[:-1], want[-1] + 1e-9], want)


@pytest.mark.thin(10)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", TABLE)
def test_equals_dense(name: str, ranks: int) -> None:
    check_dense(TABLE[name], ranks)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(1, (20,)), (2, (0, 20)), (3, (19, 0, 1)), (4, (5, 5, 5, 5)), (8, (0, 7, 0, 0, 1, 2, 10, 0))],
)
@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_uneven_shards_and_empty_ranks(op: str, ranks: int, sizes: tuple[int, ...]) -> None:
    case = Case(op, 20, sizes=sizes, heads=(4, 2), cu_seqlens=(0, 3, 3, 18, 20))
    check_dense(case, ranks)


@pytest.mark.parametrize("name", UNEVEN[8])
def test_eight_uneven_shards(name: str) -> None:
    check_dense(UNEVEN[8][name], 8)


@pytest.mark.parametrize("name", TABLE)
def test_no_group_is_one_device(name: str) -> None:
    case = replace(TABLE[name], layout=None)
    same(run_rank(case, 0, 1, None), expected(case))


def heavy_tailed(case: Case) -> Case:
    """The case with activations as models have them: a few channels far above the rest."""

    class Outliers(Case):
        def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            q, k, v, dout = super().tensors()
            scale = torch.ones(q.shape[-1], dtype=q.dtype)
            scale[::5] = 6.0
            return q * scale, k * scale, v, dout

    return Outliers(**case.__dict__)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spread", ["gaussian", "outliers"])
@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_bf16_error_is_the_kernels_own(op: str, spread: str, ranks: int) -> None:
    case = Case(
        op, 256, heads=(4, 2), dims=(16, 16), cu_seqlens=(0, 100, 256), dtype=torch.bfloat16
    )
    check_rounding(heavy_tailed(case) if spread == "outliers" else case, ranks)


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_kernels_agree(name: str) -> None:
    case = TABLE[name]
    q, k, v, _ = case.tensors()
    by_kernel = [case.call(q, k, v, kernel=kernel) for kernel in ("torch", "reference")]
    for a, b in zip(*by_kernel, strict=True):
        assert_same(name, a, b)


def test_gradient_flows_through_lse() -> None:
    case = Case("varlen", 12, cu_seqlens=(0, 5, 12), heads=(2, 1), dims=(4, 4))
    q, k, v, _ = (t.requires_grad_() for t in case.tensors())

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = case.call(q, k, v)
        return out.sum(-1) * lse.T

    assert torch.autograd.gradcheck(both, (q, k, v))


def test_gradient_through_lse_alone_across_ranks() -> None:
    case = TABLE["packed grouped"]
    weight = torch.arange(1.0, 1 + 8 * 45, dtype=torch.float64).view(8, 45)

    def rank_grads(comm) -> list[torch.Tensor]:
        layout = case.layout_of(4)
        q, k, v, _ = (layout.shard(t, comm.rank, 0).requires_grad_() for t in case.tensors())
        _, lse = case.call(q, k, v, process_group=comm)
        return list(torch.autograd.grad(lse, (q, k, v), layout.shard(weight, comm.rank, 1)))

    q, k, v, _ = (t.requires_grad_() for t in case.tensors())
    _, lse = case.call(q, k, v)
    alone = torch.autograd.grad(lse, (q, k, v), weight)
    cut = run_ranks(4, rank_grads)
    for n, want in enumerate(alone):
        assert_same(["dq", "dk", "dv"][n], case.layout_of(4).unshard([r[n] for r in cut], 0), want)
    assert alone[2].abs().max() == 0 < alone[0].abs().max()


def test_deterministic_bit_for_bit() -> None:
    case = replace(TABLE["grouped 4:1"], dtype=torch.float32)
    first, second = (
        run_ranks(4, lambda comm: run_rank(case, comm.rank, 4, comm)) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_lse_may_be_used_in_the_loss_of_one_rank_only() -> None:
    case = TABLE["packed grouped"]
    layout = case.layout_of(2)

    def rank_grads(comm) -> list[torch.Tensor]:
        q, k, v, _ = (layout.shard(t, comm.rank, 0).requires_grad_() for t in case.tensors())
        out, lse = case.call(q, k, v, process_group=comm)
        loss = out.sum() + (lse.sum() if comm.rank else 0.0)
        return list(torch.autograd.grad(loss, (q, k, v)))

    q, k, v, _ = (t.requires_grad_() for t in case.tensors())
    out, lse = case.call(q, k, v)
    loss = out.sum() + layout.shard(lse, 1, 1).sum()
    cut = run_ranks(2, rank_grads)
    for n, want in enumerate(torch.autograd.grad(loss, (q, k, v))):
        assert_same(["dq", "dk", "dv"][n], layout.unshard([r[n] for r in cut], 0), want)


def test_cu_seqlens_changed_after_the_forward_do_not_reach_the_backward() -> None:
    q = torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True)
    grads = []
    for change in (False, True):
        cu = np.array([0, 4, 8])
        out = wrap_ring_attn_varlen_func(q, q, q, cu, cu, causal=True)
        if change:
            cu[1] = 2
        grads.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("packed", [False, True])
def test_plans_are_of_the_dims_of_the_call(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is chosen by the heads that there are, times the batch, and by bytes of elements."""
    monkeypatch.setattr(TensorSpec, "planned_itemsize", 8)
    asked: list[PlanRequest] = []
    best = plans.best_plan
    monkeypatch.setattr(plans, "best_plan", lambda request: asked.append(request) or best(request))
    shape = (48,) if packed else (3, 16)
    cu = [0, 31, 96]

    def body(comm: Comm) -> None:
        q, k = torch.randn(*shape, 4, 10), torch.randn(*shape, 2, 10)
        v, where = torch.randn(*shape, 2, 6), {"causal": True, "process_group": comm}
        if packed:
            wrap_ring_attn_varlen_func(q, k, v, cu, cu, **where)
        else:
            wrap_ring_attn_func(q, k, v, **where)

    run_ranks(2, body)
    batch = 1 if packed else 3
    assert {request.head_dims for request in asked} == {(10 * batch, 6 * batch)}
    assert {request.itemsize for request in asked} == {8}


def test_plans_of_cpus_are_those_of_16_bits() -> None:
    """So what is planned ahead for either is found there, whatever the dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        cpu, gpu = (TensorSpec(torch.Size([1]), dtype, torch.device(n)) for n in ("cpu", "cuda"))
        assert (cpu.planned_itemsize, gpu.planned_itemsize) == (2, dtype.itemsize)


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
def test_balanced_by_name(window: tuple[int, int]) -> None:
    """It is Layout.balanced of the mask of the call."""
    cu, ranks, how = [0, 40, 47, 47, 90], 3, {"causal": True, "window_size": window}
    layout = Layout.balanced(AttnMask.varlen(cu, causal=True, window=window), ranks)
    whole = [torch.randn(cu[-1], heads, 8).double() for heads in (4, 2, 2)]

    def body(comm: Comm) -> list[torch.Tensor]:
        mine = [layout.shard(t, comm.rank, dim=0) for t in whole]
        where = [{"layout": each, "process_group": comm} for each in (layout, "balanced")]
        return [wrap_ring_attn_varlen_func(*mine, cu, cu, **how, **each) for each in where]

    for one, other in run_ranks(ranks, body):
        assert torch.equal(one, other)


def test_balanced_by_name_is_of_documents() -> None:
    q = torch.randn(1, 16, 2, 8)
    with pytest.raises(ArgumentError, match='layout="balanced" is of packed documents'):
        run_ranks(
            2, lambda comm: wrap_ring_attn_func(q, q, q, process_group=comm, layout="balanced")
        )

    def two_lengths(comm: Comm) -> None:
        ends, where = ([0, 4, 32], [0, 6, 32]), {"process_group": comm, "layout": "balanced"}
        wrap_ring_attn_varlen_func(q[0], q[0], q[0], *ends, **where)

    with pytest.raises(ArgumentError, match="for q and k of the same lengths"):
        run_ranks(2, two_lengths)
    with pytest.raises(ArgumentError, match="layout must be a Layout, 'balanced' or None"):
        wrap_ring_attn_func(q, q, q, layout="zigzag")
