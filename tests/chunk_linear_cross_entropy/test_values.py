"""Chunked linear cross entropy on one rank, against torch's own over all logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from dense import worst
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import LossCase, check, expected, results, run_part
from torch import Tensor

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy, chunks

BASE = LossCase((2, 7))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "all", "but last"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_reductions_and_ignored_tokens(reduction: str, ignored: str, softcap: float) -> None:
    case = replace(BASE, reduction=reduction, ignored=ignored, softcap=softcap, bias=True)
    check(f"{case}", case, run_part(case))


@pytest.mark.parametrize("chunk_size", [1, 2, 13, 14, 15, 1000, None])
def test_chunk_sizes(chunk_size: int | None) -> None:
    check("chunks", BASE, run_part(replace(BASE, chunk_size=chunk_size)))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (9,)},
        {"tokens": (2, 3, 2, 3)},
        {"tokens": (1, 1)},
        {"tokens": (3, 0), "reduction": "none"},
        {"tokens": (0, 4), "reduction": "sum"},
        {"tokens": (0,)},
        {"vocab": 1},
        {"width": 1},
        {"ignore_index": 4, "ignored": "none"},  # a row of the weight
        {"ignore_index": 10**9},
    ],
)
def test_shapes(change: dict) -> None:
    case = replace(BASE, **change)
    check(f"{change}", case, run_part(case))


BARRED = replace(BASE, bias=True, reduction="none", barred=4)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("targets", [False, True])
def test_logits_of_minus_infinity(softcap: float, targets: bool) -> None:
    """Their targets have an infinite loss, and gradients; with a softcap they are -softcap."""
    case = replace(BARRED, softcap=softcap, barred_targets=targets)
    got = run_part(case)
    check(f"{case}", case, got)
    assert got[0].isinf().any() == (targets and not softcap)


def test_tokens_with_no_other_logit_are_nan() -> None:
    """As torch's: loss, unless it is left out, and every gradient."""
    case = replace(BARRED, barred=11, barred_targets=True)
    for got, want in zip(run_part(case), expected(case), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isneginf(), want.isneginf())


def test_the_comparison_can_fail() -> None:
    got = run_part(BASE)
    for n in range(len(got)):
        wrong = [t + 1e-9 if m == n else t for m, t in enumerate(got)]
        with pytest.raises(AssertionError, match="error 1"):
            check("wrong", BASE, wrong)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    vocab=st.integers(1, 9),
    width=st.integers(1, 4),
    ignored=st.sampled_from(["none", "some", "all", "but last"]),
    bias=st.booleans(),
    softcap=st.sampled_from([0.0, 0.7]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    chunk_size=st.one_of(st.none(), st.integers(1, 8)),
)
def test_any_call(**options) -> None:
    case = LossCase(**options)
    check(f"{case}", case, run_part(case))


def test_strides_do_not_matter() -> None:
    hidden, weight, target, _ = BASE.tensors()
    strided = (
        hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight.t().contiguous().t(),
        target.repeat(1, 2)[:, :7],
        None,
    )
    assert not any(t.is_contiguous() for t in strided if t is not None)
    check("strided", BASE, results(BASE, BASE.call, strided, BASE.upstream()))


def test_the_mean_is_torchs() -> None:
    hidden, weight, target, _ = BASE.tensors()
    loss = chunk_linear_cross_entropy(hidden, weight, target)
    want = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)


def test_the_mean_of_no_tokens_is_zero() -> None:
    loss, _, dhidden, dweight = run_part(replace(BASE, ignored="all"))
    assert loss == 0
    *_, dh, dw = results(BASE, BASE.call, replace(BASE, ignored="all").tensors(), (loss + 1, loss))
    assert not dh.any() and not dw.any()
    assert dhidden.any() and dweight.any()  # these have a gradient of lse


def test_z_loss_through_lse() -> None:
    hidden, weight, target, _ = BASE.tensors()

    def ours(h: Tensor, w: Tensor) -> Tensor:
        loss, lse = chunk_linear_cross_entropy(h, w, target, return_lse=True)
        return loss + 0.1 * lse.square().mean()

    def plain(h: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(h, w)
        z_loss = logits.logsumexp(-1).square().mean()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.1 * z_loss

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    for got, want in zip(
        torch.autograd.grad(ours(*leaves), leaves),
        torch.autograd.grad(plain(*leaves), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_targets_that_do_not_exist_are_nan_where_they_are() -> None:
    hidden, weight, target, _ = replace(BASE, ignored="some").tensors()
    bad = target.clone()
    bad[0, 1], bad[1, 3] = 11, -1
    hidden.requires_grad_()
    loss = chunk_linear_cross_entropy(hidden, weight, bad, reduction="none")
    loss.sum().backward()
    missing = (bad == 11) | (bad == -1)
    assert torch.equal(loss.isnan(), missing)
    assert torch.equal(hidden.grad.isnan().any(-1), missing)
    assert chunk_linear_cross_entropy(hidden, weight, bad).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_error_is_that_of_the_plain_form(dtype: torch.dtype, reduction: str) -> None:
    case = LossCase(
        (2, 40), 300, 64, bias=True, softcap=5.0, reduction=reduction, chunk_size=7, dtype=dtype
    )
    assert_low_precision(case)


def assert_low_precision(case: LossCase) -> None:
    """Errors at most twice those of bf16 linear, then fp32; plus a rounding of the result."""
    got = run_part(case)
    plain = results(case, case.dense, case.tensors(), case.upstream())
    assert got[0].dtype == got[1].dtype == torch.float32
    assert all(g.dtype == case.dtype for g in got[2:])
    for name, a, b, truth in zip("01hwb", got, plain, expected(case), strict=True):
        rounding = torch.finfo(a.dtype).eps * truth.abs().max()
        assert worst(a.cpu(), truth) <= 2 * worst(b.cpu(), truth) + rounding, name


@pytest.fixture
def low_precision_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU multiplies: factors in low precision, sums in fp32."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        wide = torch.promote_types(b.dtype, torch.float32)
        return a.to(wide) @ b.to(wide)

    monkeypatch.setattr(chunks, "_mixed", lambda t: t.itemsize == 2)
    monkeypatch.setattr(chunks, "product", product)
    monkeypatch.setattr(chunks, "add_product", lambda c, a, b: c.add_(product(a, b)))


@pytest.mark.covering(1)
@pytest.mark.usefixtures("low_precision_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-5, 1.0, 1e5])
@pytest.mark.parametrize("part", ["loss", "lse", "both"])
def test_gradients_of_logits_of_any_size(dtype: torch.dtype, size: float, part: str) -> None:
    """The error is one rounding of a factor, whatever upstream gradients are: a mean over a
    million tokens, or a large loss scale."""
    case = LossCase((40,), 300, 64, bias=True, softcap=5.0, ignored="none", dtype=dtype)
    got, want = gradients_twice(case, size * torch.rand(40), part)
    for name, a, b in zip("hwb", got, want, strict=True):
        assert worst(a, b) <= 2 * torch.finfo(dtype).eps * b.abs().max(), name


@pytest.mark.usefixtures("low_precision_products")
def test_a_gradient_that_is_not_finite_stays_with_its_token() -> None:
    case = LossCase((40,), 300, 64, bias=True, ignored="none", dtype=torch.float16)
    g = torch.full((40,), 1e-6)
    g[3], g[7] = torch.nan, torch.inf
    (dhidden, *_), (want, *_) = gradients_twice(case, g, "loss")
    good = g.isfinite()
    assert not dhidden[~good].isfinite().any()
    assert worst(dhidden[good], want[good]) <= 2e-3 * want[good].abs().max()


def gradients_twice(case: LossCase, g: Tensor, part: str) -> tuple[list[Tensor], list[Tensor]]:
    """Of hidden, weight and bias, before they are rounded: in the case's dtype, and in fp64."""
    hidden, weight, target, bias = case.tensors()
    dloss, dlse = (g if part in (name, "both") else torch.zeros_like(g) for name in ("loss", "lse"))
    made = []
    for like in (torch.float32, torch.float64):
        h, w, b = (t if like == torch.float32 else t.double() for t in (hidden, weight, bias))
        head = chunks.Head(w, b, 0, case.softcap, 7)
        lse, _ = chunks.statistics(head, h, target)
        grads = chunks.gradients(head, h, target, lse, dloss.to(like), dlse.to(like), like)
        made.append([grad for grad in grads if grad is not None])
    return made[0], made[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    case = LossCase(
        (3, 50), 1000, 64, bias=True, softcap=5.0, chunk_size=40, dtype=dtype, device="cuda"
    )
    if dtype == torch.float64:
        check("cuda", case, run_part(case))
    else:
        assert_low_precision(case)
        assert_low_precision(replace(case, chunk_size=None, softcap=0.0, reduction="none"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-9, 1e-5, 1e5])
def test_small_and_large_gradients_on_a_gpu(size: float) -> None:
    case = LossCase((40,), 300, 64, bias=True, ignored="none", dtype=torch.float16, device="cuda")
    got, want = gradients_twice(case, size * torch.rand(40, device="cuda"), "both")
    for name, a, b in zip("hwb", got, want, strict=True):
        assert worst(a, b) <= 2 * torch.finfo(torch.float16).eps * b.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_waits_for_the_gpu(dtype: torch.dtype) -> None:
    case = LossCase((3, 50), 1000, 64, dtype=dtype, device="cuda")
    given, douts = case.tensors(), case.upstream()
    results(case, case.call, given, douts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(case, case.call, given, douts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nnscalers_arguments_and_result() -> None:
    """Five by position, and a loss for each token."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 6, 4).double(), torch.randn(5, 4).double()
    target = torch.randint(5, (2, 6)).index_fill(1, torch.tensor([2]), 1)
    losses = chunk_linear_cross_entropy(hidden, weight, target, 1, 4, reduction="none")
    dense = F.cross_entropy(
        (hidden @ weight.T).flatten(0, 1), target.flatten(), ignore_index=1, reduction="none"
    )
    torch.testing.assert_close(losses, dense.view(2, 6), rtol=1e-12, atol=1e-12)
