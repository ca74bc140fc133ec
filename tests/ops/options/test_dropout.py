"""Dropout: the same on any number of ranks, drawn anew, and right on average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense import assert_same
from op_cases import Case, cut, run_rank, same
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    run_ranks,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm

DROPPED = Case("ring", 24, dropout=0.4, heads=(8, 8), dims=(4, 3), batch=2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_dropout_draws_the_same_on_any_number_of_ranks(ranks: int, layout: str) -> None:
    where = f"{layout}:24:{ranks}" + (":1" if layout == "striped" else "")
    alone = run_rank(DROPPED, 0, 1, None)
    same(cut(replace(DROPPED, layout=where), ranks), alone, 1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_pattern_of_dropout_bit_for_bit(ranks: int) -> None:
    """One value column a key, and no scores: out shows which probabilities are kept."""
    n, heads, layout = 24, 4, Layout.zigzag(24, ranks)
    v = torch.eye(n, dtype=torch.float64).view(1, n, 1, n).expand(2, n, heads, n)
    zero = torch.zeros(2, n, heads, 4, dtype=torch.float64)

    def pattern(q: Tensor, v: Tensor, **where: Any) -> Tensor:
        mask = AttnMask.full(n)
        return wrap_masked_attn_func(q, q, v, mask, dropout_p=0.4, dropout_seed=3, **where) != 0

    def of_rank(comm: Comm) -> Tensor:
        mine = layout.shard(zero, comm.rank), layout.shard(v, comm.rank)
        return pattern(*mine, process_group=comm, layout=layout)

    whole = layout.unshard(run_ranks(ranks, of_rank))
    assert torch.equal(whole, pattern(zero, v))
    assert abs(whole.double().mean() - 0.6) < 0.02
    # No head, batch entry or row is another's copy.
    rows = whole.transpose(1, 2).reshape(-1, n)
    assert len(rows.unique(dim=0)) == len(rows)


def test_forward_and_backward_drop_the_same() -> None:
    """out is linear in v, so dv of out's sum is each key's column sum of what out was made with."""
    n = 24
    v = torch.eye(n, dtype=torch.float64).view(1, n, 1, n).repeat(1, 1, 8, 1).requires_grad_()
    q, k, _, _ = replace(DROPPED, batch=1).tensors()
    out = wrap_ring_attn_func(q, k, v, dropout_p=0.4, dropout_seed=3)
    weights = out.detach().transpose(1, 2)  # [b, h, i, j]
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert_same("dv", dv[..., 0], weights.sum(2).transpose(1, 2))
    assert (weights == 0).double().mean() > 0.4


def test_seeds_differ_and_repeat() -> None:
    q, k, v, _ = DROPPED.tensors()

    def out(seed: Any) -> Tensor:
        return wrap_ring_attn_func(q, k, v, dropout_p=0.4, dropout_seed=seed)

    assert torch.equal(out(1), out(torch.tensor([1])))
    assert torch.equal(out(1), out(torch.tensor(1)))
    different = [out(seed) for seed in (0, 1, 2, 2**32, 2**40 + 1, -1)]
    for n, a in enumerate(different):
        assert all(not torch.equal(a, b) for b in different[:n])


def test_no_seed_draws_from_torchs_generator() -> None:
    q, k, v, _ = DROPPED.tensors()

    def two() -> list[Tensor]:
        torch.manual_seed(5)
        return [wrap_ring_attn_func(q, k, v, dropout_p=0.4) for _ in range(2)]

    (first, second), again = two(), two()
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    state = torch.get_rng_state()
    wrap_ring_attn_func(q, k, v)
    wrap_ring_attn_func(q, k, v, dropout_p=0.4, dropout_seed=1)
    assert torch.equal(torch.get_rng_state(), state), "nothing else may draw"


def test_dropout_is_right_on_average() -> None:
    """The mean over seeds approaches the undropped output, as 1 / sqrt(seeds)."""
    q, k, v, _ = Case("ring", 6, heads=(64, 1), dims=(4, 3)).tensors()
    q = q[:, :, :1].expand(-1, -1, 64, -1)  # heads draw apart, so 64 heads are 64 draws
    undropped = wrap_ring_attn_func(q, k, v, causal=False)[:, :, 0]
    draws = [
        wrap_ring_attn_func(q, k, v, causal=False, dropout_p=0.3, dropout_seed=seed)
        for seed in range(60)
    ]
    each = torch.cat(draws, dim=2)
    deviation = each.std(dim=2) / each.shape[2] ** 0.5
    assert ((each.mean(dim=2) - undropped).abs() < 4 * deviation).all()
    assert deviation.max() < 0.02
