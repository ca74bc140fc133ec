"""What is done to the scores: softcap, ALiBi, dropout and sinks, and the gradient of lse."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense import assert_same, dense_attention
from op_cases import SEED, Case, expected, gather, run_rank
from torch import Tensor

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    make_plan,
    run_ranks,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.kernels import Request
from customized_ops.ring_attention.core.kernels.adapters import reference
from customized_ops.ring_attention.op import call as kernel_request

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
HOLES = AttnMask.from_slices([(1, 5, 2, 6, -9, 9), (5, 8, 0, 4, -4, 0)], 9, 9)


def cut(case: Case, ranks: int) -> list[Tensor]:
    """Whole results of the case over in-process ranks."""
    return gather(case, run_ranks(ranks, lambda comm: run_rank(case, comm.rank, ranks, comm)))


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


# ----------------------------------------------------------------------------------------- dropout

DROPPED = Case("ring", 24, dropout=0.4, heads=(8, 8), dims=(4, 3), batch=2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_dropout_draws_the_same_on_any_number_of_ranks(ranks: int, layout: str) -> None:
    where = f"{layout}:24:{ranks}" + (":1" if layout == "striped" else "")
    alone = run_rank(DROPPED, 0, 1, None)
    for name, a, b in zip(NAMES, cut(replace(DROPPED, layout=where), ranks), alone, strict=False):
        assert_same(name, a, b, 1e-12)


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


# -------------------------------------------------------------------------------- kernels, rounding


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "has no softcap"),
        ({"dropout_p": 0.1}, "has no dropout"),
        ({"softcap": 2.0, "dropout_p": 0.1}, "has no softcap, dropout"),
    ],
)
def test_a_kernel_that_cannot_says_why_and_which_can(options: Any, reason: str) -> None:
    q, k, v, _ = Case("ring", 8).tensors()
    with pytest.raises(ValueError, match=re.escape(f"({reason}); able: reference")):
        wrap_ring_attn_func(q, k, v, kernel="torch", **options)


@pytest.mark.parametrize("op", ["ring", "zigzag", "window", "streaming"])
def test_what_32_bit_indices_do_not_reach_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """By a bound that no tensor of a kernel call exceeds on any rank."""
    asked: list[tuple[int, bool]] = []
    given: list[int] = []

    def most(*args: Any) -> int:
        asked.append((found := most_elements(*args), found >= kernel_request.LARGE))
        return found

    def choose(name: str, kernel: str, request: Request) -> Any:
        assert ("64-bit indices" in request.features) == asked[-1][1]
        return SimpleNamespace(NAME="spy", forward=forward, backward=reference.backward)

    def forward(*args: Any) -> Any:
        given.extend(t.numel() for t in args[0])
        return reference.forward(*args)

    most_elements = kernel_request.most_elements
    monkeypatch.setattr(kernel_request, "most_elements", most)
    monkeypatch.setattr(kernel_request, "choose", choose)
    monkeypatch.setattr(kernel_request, "LARGE", 3000)
    for case in (
        Case(op, 45, heads=(4, 2), dims=(8, 12), batch=2),
        Case(op, 46, heads=(4, 2), dims=(8, 6), layout="contiguous"),
        Case(op, 47, heads=(4, 2), dims=(8, 6), sizes=(40, 0, 7)),
    ):
        asked.clear()
        given.clear()
        cut(case, 3)
        assert max(given) <= min(bound for bound, _ in asked)
        assert len({bound for bound, _ in asked}) == 1, "ranks ask for different things"
    assert run_rank(Case(op, 45, heads=(4, 2), dims=(8, 12), batch=2), 0, 1, None)
    assert asked[-1] == (2 * 45 * 4 * 12, True)


@pytest.mark.parametrize(
    ("ranks", "tokens", "heads", "team_size", "most"),
    [
        (1, 1 << 19, (32, 8), 1, (1 << 19) * 32),
        (2, 1 << 19, (32, 8), 1, (1 << 18) * 32),
        (4, 1 << 18, (64, 8), 1, (1 << 16) * 64),
        (4, 1 << 18, (8, 8), 1, (1 << 18) * 8),  # keys that are gathered
        (8, 1 << 20, (64, 8), 8, (1 << 20) * 8),
    ],
)
def test_the_bound_on_elements_is_tight(
    ranks: int, tokens: int, heads: tuple[int, int], team_size: int, most: int
) -> None:
    layout = Layout.zigzag(tokens, ranks)
    options = {"heads": heads, "team_size": team_size, "stages": 0, "assignment": "owner"}
    plan = make_plan(AttnMask.causal(tokens), layout, **options)
    q, k = (torch.empty(1, tokens // ranks, h, 128, device="meta") for h in heads)
    assert kernel_request.most_elements(plan, q, k, heads[1]) == 128 * most


@pytest.mark.parametrize("options", [{"alibi": True}, {"sink": True}, {"alibi": True, "batch": 2}])
def test_kernels_agree(options: dict[str, Any]) -> None:
    case = Case("ring", 20, heads=(4, 2), **options)
    given = (*case.tensors()[:3], case.per_head()[1])
    torchs, ours = (case.call(*given, kernel=kernel) for kernel in ("torch", "reference"))
    assert_same("out", torchs[0], ours[0])
    assert_same("lse", torchs[1], ours[1])


ROUGH = Case("ring", 192, heads=(4, 2), dims=(16, 16), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"alibi": True},
        {"dropout": 0.2},
        {"sink": True},
        {"softcap": 2.0, "alibi": True, "dropout": 0.2, "sink": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_bf16_error_is_the_kernels_own(options: dict[str, Any]) -> None:
    """Error against fp64 at most twice the single device's in bf16, plus rounding of the result;
    that of a sink's gradient, which ranks add up in bf16, once for every rank."""
    case = replace(ROUGH, **options)
    exact, alone, many = expected(case), run_rank(case, 0, 1, None), cut(case, 4)
    for name, truth, one, four in zip(NAMES, exact, alone, many, strict=False):
        error_one, error_four = ((x.double() - truth).abs().max() for x in (one, four))
        rounding = torch.finfo(four.dtype).eps * truth.abs().max()
        bound = 2 * error_one + rounding * (4 if name == "dsink" else 1)
        assert error_four <= bound, (name, error_one, error_four)


# --------------------------------------------------------------------------------- what is refused

Q, PACKED_Q = torch.zeros(2, 8, 4, 16), torch.zeros(8, 4, 16)
OPS: dict[str, Callable[..., Any]] = {
    "wrap_ring_attn_func": lambda **o: wrap_ring_attn_func(Q, Q, Q, **o),
    "wrap_zigzag_attn_func": lambda **o: wrap_zigzag_attn_func(Q, Q, Q, **o),
    "wrap_sliding_window_attn_func": lambda **o: wrap_sliding_window_attn_func(Q, Q, Q, **o),
    "wrap_streaming_attn_func": lambda **o: wrap_streaming_attn_func(Q, Q, Q, 2, 1, **o),
    "wrap_masked_attn_func": lambda **o: wrap_masked_attn_func(
        Q, Q, Q, AttnMask.causal(8 * o["process_group"].size), **o
    ),
    "wrap_ring_attn_varlen_func": lambda **o: wrap_ring_attn_varlen_func(
        *[PACKED_Q] * 3, *[[0, 8 * o["process_group"].size]] * 2, **o
    ),
}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"softcap": -1.0}, "softcap must be 0 (none) or above, got -1.0"),
    ({"softcap": float("inf")}, "softcap must be 0 (none) or above, got inf"),
    ({"softcap": float("nan")}, "softcap must be 0 (none) or above, got nan"),
    ({"softcap": "2"}, "softcap must be a number, got '2'"),
    ({"softcap": None}, "softcap must be a number, got None"),
    ({"softcap": True}, "softcap must be a number, got True"),
    ({"dropout_p": 1.0}, "dropout_p must be in [0, 1), got 1.0"),
    ({"dropout_p": -0.1}, "dropout_p must be in [0, 1), got -0.1"),
    ({"dropout_p": 512}, "(flash-attn's max_seqlen_q and max_seqlen_k go by name here), got 512"),
    (
        {"window_size": True},
        "(flash-attn's max_seqlen_q and max_seqlen_k go by name here), got True",
    ),
    ({"dropout_p": "half"}, "dropout_p must be a number, got 'half'"),
    ({"dropout_p": None}, "dropout_p must be a number, got None"),
    ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_p": 0.1, "dropout_seed": True}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_p": 0.1, "dropout_seed": torch.tensor([1], dtype=torch.int32)}, "dropout_seed must"),
    ({"dropout_p": 0.1, "dropout_seed": torch.tensor([1, 2])}, "dropout_seed must be an int"),
    ({"dropout_p": 0.1, "dropout_seed": 2**70}, "dropout_seed must"),
    ({"dropout_seed": "x"}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_seed": True}, "dropout_seed must be an int, an int64 tensor"),
    ({"dropout_seed": torch.tensor([1, 2])}, "dropout_seed must be an int, an int64 tensor"),
    ({"sink": torch.zeros(3)}, "shape (4,), got (3,)"),
    ({"sink": torch.zeros(1, 4)}, "sink must hold a logit for each of the 4 heads of q"),
    ({"sink": torch.zeros(4, dtype=torch.int64)}, "sink must be a floating tensor [h] or None"),
    ({"sink": 0.5}, "sink must be a floating tensor [h] or None, got 0.5"),
    ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes must be [h] or [b, h] with h = 4 heads"),
    ({"alibi_slopes": torch.zeros(1, 1, 4)}, "alibi_slopes must be [h] or [b, h]"),
    ({"alibi_slopes": torch.zeros(3, 4)}, "alibi_slopes"),
    ({"alibi_slopes": torch.zeros(4, dtype=torch.int32)}, "alibi_slopes must be a floating tensor"),
    ({"alibi_slopes": [0.1] * 4}, "alibi_slopes must be a floating tensor"),
    ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "pass slopes.detach()"),
    ({"softmax_scale": "x"}, "softmax_scale must be a number or None, got 'x'"),
    ({"softmax_scale": "1"}, "softmax_scale must be a number or None, got '1'"),
    ({"softmax_scale": True}, "softmax_scale must be a number or None, got True"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
    ({"softmax_scale": float("inf")}, "softmax_scale must be finite, got inf"),
    ({"return_lse": "no"}, "return_lse must be True or False, got 'no'"),
    ({"return_lse": None}, "return_lse must be True or False, got None"),
    ({"return_lse": np.array([1, 0])}, "return_lse must be True or False, got array([1, 0])"),
    ({"layout": "zigzag"}, "layout must be a Layout or None, got 'zigzag'"),
    ({"kernel": "fastest"}, "kernel 'fastest' is unknown"),
    ({"kernel": None}, "kernel must be the name of one, or 'auto', got None"),
    ({"kernel": 3}, "kernel must be the name of one, or 'auto', got 3"),
    (
        {"reduce_dtype": torch.float64},
        "reduce_dtype must be one of None, torch.bfloat16, torch.float16, torch.float32 where q is "
        "torch.float32, got torch.float64",
    ),
    ({"reduce_dtype": torch.float8_e4m3fn}, "reduce_dtype must be one of"),
    ({"reduce_dtype": torch.int16}, "reduce_dtype must be one of"),
    ({"reduce_dtype": "bfloat16"}, "reduce_dtype must be one of"),
    ({"reduce_dtype": 2}, "reduce_dtype must be one of"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("given", "message"), INVALID, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("op", OPS)
def test_invalid_options_are_refused_before_anything_is_sent(
    op: str, given: dict[str, Any], message: str
) -> None:
    def of_rank(comm: Comm) -> str:
        comm.start = None  # type: ignore[assignment]  # nothing may be sent
        with pytest.raises(ValueError) as caught:
            OPS[op](process_group=comm, **given)
        return str(caught.value)

    for ranks in (1, 2):
        for said in run_ranks(ranks, of_rank):
            assert message in said
            assert said.startswith(op)


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", ["yes", None, 2, np.array([1, 0])], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_deterministic_is_a_switch(op: str, given: Any) -> None:
    message = f"{op}: deterministic must be True or False, got {given!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        run_ranks(1, lambda comm: OPS[op](process_group=comm, deterministic=given))


def test_a_seed_without_dropout_is_not_used() -> None:
    """So ranks may differ in it, and nothing of it stands in the graph."""

    def of_rank(comm: Comm) -> Tensor:
        return wrap_ring_attn_func(Q, Q, Q, process_group=comm, dropout_seed=comm.rank)

    first, second = run_ranks(2, of_rank)
    assert torch.equal(first, second)
