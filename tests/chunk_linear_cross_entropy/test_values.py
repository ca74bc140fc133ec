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

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy

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
def test_nothing_waits_for_the_gpu() -> None:
    case = LossCase((3, 50), 1000, 64, dtype=torch.bfloat16, device="cuda")
    given, douts = case.tensors(), case.upstream()
    results(case, case.call, given, douts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(case, case.call, given, douts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
