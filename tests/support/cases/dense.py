"""Comparisons of tensors with what they should be."""

from __future__ import annotations

import torch
from torch import Tensor

from customized_ops.ring_attention.fuzz.specification import dense_attention, dense_gradients

__all__ = ["assert_same", "dense_attention", "dense_gradients", "worst"]


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


def worst(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference, 0 of nothing; NaN where either has one."""
    difference = (got.double() - want.double()).abs()
    return difference.max().item() if difference.numel() else 0.0
