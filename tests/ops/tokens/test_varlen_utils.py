"""cu_seqlens on the host: what was changed in place is read again, by the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention import wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.op.tokens.lengths import as_tensor, on_host

LAYOUT = Layout.contiguous(16, 4)


class Elsewhere(Tensor):
    """A CPU tensor that says it lies on a GPU, and counts its copies to the host."""

    copies = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def cpu(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
        Elsewhere.copies += 1
        return self.as_subclass(Tensor)


def plan_of(cu_seqlens: Tensor) -> Plan:
    return make_plan(AttnMask.varlen(on_host(cu_seqlens), causal=True), LAYOUT)


@pytest.mark.parametrize("kind", [Tensor, Elsewhere])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_change_in_place_gives_a_new_plan(kind: type, dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, 4, 16], dtype=dtype).as_subclass(kind)
    first = plan_of(cu_seqlens)
    assert plan_of(cu_seqlens) is first
    cu_seqlens[1] = 9
    second = plan_of(cu_seqlens)
    assert first.mask.slices[:, 1].tolist() == [4, 16]
    assert second.mask.slices[:, 1].tolist() == [9, 16]
    cu_seqlens[1] = 4
    assert plan_of(cu_seqlens) is first, "plans go by value"


def test_a_tensor_on_a_device_is_copied_once_a_change() -> None:
    cu_seqlens = torch.tensor([0, 4, 16]).as_subclass(Elsewhere)
    Elsewhere.copies = 0
    for _ in range(3):
        assert on_host(cu_seqlens).tolist() == [0, 4, 16]
    assert Elsewhere.copies == 1
    cu_seqlens[1:] += 1
    for _ in range(3):
        assert on_host(cu_seqlens).tolist() == [0, 5, 17]
    assert Elsewhere.copies == 2


def test_the_op_sees_a_change_in_place() -> None:
    q = torch.randn(16, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 4, 16])
    seen = []
    for middle in (4, 9, 4):
        cu_seqlens[1] = middle
        seen.append(wrap_ring_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, causal=True))
    fresh = torch.tensor(np.array([0, 9, 16]))
    assert torch.equal(seen[1], wrap_ring_attn_varlen_func(q, q, q, fresh, fresh, causal=True))
    assert torch.equal(seen[0], seen[2]) and not torch.allclose(seen[0], seen[1])


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray, torch.tensor, np.ndarray.tolist])
def test_the_values_of_the_forward_count_in_the_backward(kind: Callable[..., Any]) -> None:
    q = torch.randn(16, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q.requires_grad_()
    grads = []
    for change in (False, True):
        values = np.array([0, 4, 16])
        cu_seqlens = kind(values)
        out = wrap_ring_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, causal=True)
        if change:
            values[1] = cu_seqlens[1] = 9
        grads.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(*grads)


def test_what_lies_on_the_host_is_copied_and_what_lies_on_a_device_is_not() -> None:
    here, there = torch.tensor([0, 16]), torch.tensor([0, 16]).as_subclass(Elsewhere)
    copy = as_tensor("op", "cu_seqlens", here)
    assert torch.equal(copy, here) and copy.data_ptr() != here.data_ptr()
    assert as_tensor("op", "cu_seqlens", there) is there
