"""Comparisons of tensors with what they should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.fuzz.specification import dense_attention, dense_gradients

__all__ = ["assert_same", "dense_attention", "dense_gradients", "dense_results", "worst"]


def assert_same(name: str, got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    """Same shape, no NaN, infinities in the same places, the rest equal within ``tolerance``."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    assert not want.isnan().any(), f"{name}: the expected value has NaN"
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{name}: infinities differ"
    assert torch.equal(got[~finite], want[~finite]), f"{name}: infinities differ in sign"
    error = worst(got[finite], want[finite])
    assert error <= tolerance, f"{name}: error {error:.3e} > {tolerance:.3e}"


def dense_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttnMask | Tensor,
    softmax_scale: float,
    dout: Tensor,
    dlse: Tensor | None,
    **scoring: Any,
) -> tuple[Tensor, ...]:
    """:func:`dense_gradients`, with a gradient of lse where one is given."""
    if dlse is None:
        return dense_gradients(q, k, v, mask, softmax_scale, dout, **scoring)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = dense_attention(*leaves, mask, softmax_scale, **scoring)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    return out.detach(), lse.detach(), *found


def worst(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference, 0 of nothing; NaN where either has one."""
    difference = (got.double() - want.double()).abs()
    return difference.max().item() if difference.numel() else 0.0
