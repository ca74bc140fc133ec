"""What is done to the scores: softcap, ALiBi and sinks, and the gradient of lse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense import assert_same, dense_attention
from op_cases import SEED, Case, expected, run_rank
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    run_ranks,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm

HOLES = AttnMask.from_slices([(1, 5, 2, 6, -9, 9), (5, 8, 0, 4, -4, 0)], 9, 9)


# ------------------------------------------------------------------------------ unusual scales


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_of_0_or_less(scale: float) -> None:
    """Libraries that take a row's largest score before they scale it would be wrong."""
    q, k, v = (torch.randn(1, 9, 2, 8, dtype=torch.float64) for _ in "qkv")
    out = wrap_ring_attn_func(q, k, v, softmax_scale=scale)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    hidden = torch.ones(9, 9).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    assert_same("out", out, torch.einsum("bhij,bjhd->bihd", weights, v))
    with pytest.raises(ValueError, match="'torch' cannot do this"):
        wrap_ring_attn_func(q, k, v, softmax_scale=scale, kernel="torch")


# ------------------------------------------------------------------------------ gradients with lse

SMALL = Case("masked", 9, given=HOLES, heads=(4, 2), dims=(3, 2))
SCORED = {
    "plain": SMALL,
    "softcap": replace(SMALL, softcap=1.5),
    "alibi": replace(SMALL, alibi=True),
    "dropout": replace(SMALL, dropout=0.3),
    "all": replace(SMALL, softcap=1.5, alibi=True, dropout=0.3),
}


@pytest.mark.thin(6)
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", SCORED)
def test_gradcheck_through_out_and_lse(name: str, sink: bool) -> None:
    case = replace(SCORED[name], sink=sink)
    leaves = [t.requires_grad_() for t in case.tensors()[:3]]
    leaves += [case.per_head()[1].requires_grad_()] if sink else []

    def both(*given: Tensor) -> Tensor:
        out, lse = case.call(*given)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        return torch.cat([out.flatten(), finite.flatten()])

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", SCORED)
def test_gradients_through_out_and_lse_across_ranks(name: str, ranks: int) -> None:
    """Of a loss of both, with a sink; against autograd through dense attention."""
    case = replace(SCORED[name], sink=True, given=None, op="ring", length=13, batch=2)
    layout = Layout.contiguous(13, ranks)
    *_, dout = case.tensors()
    dlse = torch.cos(torch.arange(2.0 * 4 * 13, dtype=torch.float64)).view(2, 4, 13)

    def loss(out: Tensor, lse: Tensor, comm: Comm) -> Tensor:
        own = layout.shard(dout, comm.rank), layout.shard(dlse, comm.rank, 2)
        return (out * own[0]).sum() + (lse * own[1]).sum()

    def rank_grads(comm: Comm) -> list[Tensor]:
        leaves = [layout.shard(t, comm.rank).clone() for t in case.tensors()[:3]]
        leaves = [t.requires_grad_() for t in (*leaves, case.per_head()[1])]
        result = case.call(*leaves, process_group=comm, layout=layout)
        return list(torch.autograd.grad(loss(*result, comm), leaves))

    slopes, sink = case.per_head()
    leaves = [t.requires_grad_() for t in (*case.tensors()[:3], sink)]
    drawn = kept(case) if case.dropout else None
    out, lse = dense_attention(
        *leaves[:3],
        case.mask(),
        3**-0.5,
        softcap=case.softcap,
        alibi_slopes=None if slopes is None else slopes.double()[None],
        keep=drawn,
        dropout_p=case.dropout,
        sink=leaves[3],
    )
    want = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)
    per_rank = run_ranks(ranks, rank_grads)
    for n, label in enumerate(("dq", "dk", "dv")):
        assert_same(label, layout.unshard([r[n] for r in per_rank]), want[n])
    assert_same("dsink", sum(r[3] for r in per_rank), want[3])


def kept(case: Case) -> Tensor:
    """Which probabilities are kept, read off the op: with one value column a key, 1 for its own."""
    n = case.length
    q, k, _, _ = case.tensors()
    v = torch.eye(n, dtype=q.dtype).view(1, n, 1, n).expand(len(q), n, k.shape[2], n)
    options = {"dropout_p": case.dropout, "dropout_seed": SEED, "causal": case.causal}
    out = wrap_ring_attn_func(q * 0, k * 0, v, **options)
    return (out != 0).transpose(1, 2)


# ------------------------------------------------------------------------------------------- sinks


def test_a_row_with_no_key_gives_its_sink_nothing_through_out() -> None:
    """Such a row's out is 0 whatever the sink, and its lse is the sink."""
    q, k, v, _ = SMALL.tensors()
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    out, lse = SMALL.call(q, k, v, sink)
    empty = ~torch.from_numpy(HOLES.to_dense()).any(1)
    assert empty.tolist() == [True] + [False] * 7 + [True]
    assert out[:, empty].abs().max() == 0
    assert_same("lse", lse[..., empty], sink[:, None].expand(1, 4, 2))
    (through_out,) = torch.autograd.grad(out[:, empty].sum(), sink, retain_graph=True)
    (through_lse,) = torch.autograd.grad(lse[..., empty].sum(), sink, retain_graph=True)
    (of_others,) = torch.autograd.grad(out[:, ~empty].square().sum(), sink)
    assert through_out.tolist() == [0.0] * 4
    assert_same("dsink", through_lse, torch.full((4,), 2.0, dtype=torch.float64))
    assert (of_others != 0).all()


@pytest.mark.parametrize("ranks", [2, 5])
def test_sink_gradients_add_up_over_ranks(ranks: int) -> None:
    case = replace(SMALL, sink=True, batch=2)
    per_rank = run_ranks(ranks, lambda comm: run_rank(case, comm.rank, ranks, comm)[5])
    whole = expected(case)[5]
    assert_same("dsink", sum(per_rank), whole)
    assert any((part - whole).abs().max() > 1e-3 for part in per_rank)


def test_a_sink_far_below_is_none_and_one_far_above_takes_all() -> None:
    q, k, v, _ = (case := Case("ring", 12)).tensors()
    out, lse = case.call(q, k, v)
    below = case.call(q, k, v, torch.full((4,), -200.0, dtype=q.dtype))
    assert_same("out", below[0], out)
    assert_same("lse", below[1], lse)
    above = case.call(q, k, v, torch.full((4,), 200.0, dtype=q.dtype))
    assert above[0].abs().max() < 1e-60
    assert_same("lse", above[1], torch.full_like(lse, 200.0))


# --------------------------------------------------------------------------------- ALiBi, softcap


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_alibi_slopes_of_each_batch_entry(ranks: int) -> None:
    case = Case("ring", 14, heads=(8, 4), dims=(4, 3), batch=3)
    slopes = torch.linspace(-0.2, 0.9, 24).view(3, 8)
    layout = Layout.zigzag(14, ranks)
    q, k, v, _ = case.tensors()

    def of_rank(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = [layout.shard(t, comm.rank) for t in (q, k, v)]
        where = {"process_group": comm, "layout": layout, "return_lse": True}
        return wrap_ring_attn_func(*mine, alibi_slopes=slopes, **where)

    out, lse = zip(*run_ranks(ranks, of_rank), strict=True)
    want = dense_attention(q, k, v, case.mask(), 0.5, alibi_slopes=slopes.double())
    assert_same("out", layout.unshard(out), want[0])
    assert_same("lse", layout.unshard(lse, 2), want[1])


def test_softcap_bounds_scores() -> None:
    """With one key a row, lse is the row's score."""
    q = torch.linspace(-100, 100, 9, dtype=torch.float64).view(1, 9, 1, 1)
    mask = AttnMask.sliding_window(9, 0, 0)
    options = {"softmax_scale": 1.0, "return_lse": True}
    _, scores = wrap_masked_attn_func(q, torch.ones_like(q), q, mask, softcap=3.0, **options)
    assert_same("scores", scores, 3.0 * torch.tanh(q.view(1, 1, 9) / 3.0))
    _, scores = wrap_masked_attn_func(q, torch.ones_like(q), q, mask, softcap=0.0, **options)
    assert_same("scores", scores, q.view(1, 1, 9))
