"""What flex_attention is given, what of it is compiled in, and the real one on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense import assert_same, dense_attention, dense_gradients, worst
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from customized_ops.ring_attention import wrap_masked_attn_func
from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.kernels.adapters import flex
from customized_ops.ring_attention.core.mask import AttnMask
from tests.kernels.small_cases import SCALE, SLOPES, for_dense, pairs_of, tokens_of

from .flex_cases import MASKS, SCORINGS, draw, over_masks, over_scorings


def test_block_masks_are_made_once() -> None:
    pairs = pairs_of(MASKS["causal"])
    assert flex._masks(pairs, torch.device("cpu")) is flex._masks(pairs, torch.device("cpu"))


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["window", "stripes", "few tokens"])
@pytest.mark.parametrize("scoring", [SCORINGS["plain"], SCORINGS["both"]], ids=["plain", "both"])
def test_the_real_one_takes_what_it_is_given(
    name: str, scoring: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, but not compiled: that needs no compiler and has no gradients."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    mask = MASKS[name]
    q, k, v, _, _ = draw(mask, 16, 16, torch.float32)
    tokens = tokens_of(mask.q_len, mask.k_len)
    want = dense_attention(
        *(t.double() for t in (q, k, v)), mask, SCALE, **for_dense(scoring, tokens)
    )
    out, lse = flex.forward(ForwardOperands(q, k, v), pairs_of(mask), scoring, tokens)
    assert_same("out", out, want[0], 1e-5)
    assert_same("lse", lse, want[1], 1e-5)


def test_scales_and_softcaps_are_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inputs of a graph, which torch makes of numbers that change, no GPU kernel takes them."""
    inputs: list[Any] = []

    def record(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Any:
        inputs.append(given)
        return graph

    compiled = torch.compile(flex_attention, fullgraph=True, backend=record)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    mask = MASKS["causal"]
    q, k, v, _, _ = draw(mask, 16, 16, torch.float32)
    tokens = tokens_of(mask.q_len, mask.k_len)
    slopes = SLOPES[:1]
    for scoring in (
        Scoring(SCALE, alibi_slopes=slopes),
        Scoring(SCALE, softcap=1.5, alibi_slopes=slopes),
        Scoring(2 * SCALE, softcap=2.5, alibi_slopes=slopes),
    ):
        flex.forward(ForwardOperands(q, k, v), pairs_of(mask), scoring, tokens)
    assert len(inputs) == 3
    assert not [x for given in inputs for x in given if isinstance(x, Tensor) and not x.ndim]


# ---------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@over_masks
@over_scorings
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_on_a_gpu(mask: AttnMask, scoring: Scoring, dtype: torch.dtype) -> None:
    """No worse than twice plain torch in the same dtype, plus rounding: in fp32 more, as hundreds
    of products are added up in another order."""
    roundings = 8 if dtype == torch.float32 else 2
    q, k, v, dout, dlse = draw(mask, 64, 32, dtype)
    same = for_dense(scoring, tokens_of(mask.q_len, mask.k_len))
    wide = [t.double() for t in (q, k, v)]
    exact = dense_gradients(*wide, mask, SCALE, dout.double(), dlse, **same)
    plain = dense_gradients(q, k, v, mask, SCALE, dout, dlse, **same)
    if scoring.alibi_slopes is not None:
        scoring = Scoring(SCALE, scoring.softcap, scoring.alibi_slopes.cuda())
    on_gpu = [t.cuda() for t in (q, k, v)]
    pairs, tokens = pairs_of(mask), tokens_of(mask.q_len, mask.k_len, "cuda")
    out, lse = flex.forward(ForwardOperands(*on_gpu), pairs, scoring, tokens)
    operands = BackwardOperands(dout.cuda(), *on_gpu, out, lse, dlse.float().cuda())
    gradients = flex.backward(operands, pairs, scoring, tokens)
    names = ("out", "lse", "dq", "dk", "dv")
    for name, got, want, low in zip(names, (out, lse, *gradients), exact, plain, strict=True):
        finite = want.isfinite()
        largest = want[finite].abs().max().item() if finite.any() else 0.0
        rounding = torch.finfo(dtype).eps * largest
        limit = 2 * worst(low[finite], want[finite]) + roundings * rounding
        assert_same(name, got.cpu(), want, limit)


@pytest.mark.gpu
def test_in_an_op_on_a_gpu() -> None:
    """Below autograd, where the backward has to switch it on."""
    mask = MASKS["documents"]
    q, k, v, dout, _ = (t.cuda() for t in draw(mask, 64, 64, torch.bfloat16))
    found = []
    for kernel in ("flex", "reference"):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = wrap_masked_attn_func(*leaves, mask, kernel=kernel)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for name, got, want in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert_same(name, got, want, 0.02 * want.abs().max().item())
