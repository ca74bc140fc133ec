"""The kernel "cudnn_flex" over a dense stand-in with its library's signatures and checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dense import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slice_strategy import grids_of_bands
from torch import Tensor
from windows import attended, draw, gradients

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import cudnn_flex, reference
from customized_ops.ring_attention.core.mask.slices import UNBOUNDED, as_slices

SCORING = Scoring(0.35)


def create_mask_plan(
    mask_func: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    build_backward: bool | None = None,
) -> Any:
    """The mask that the endpoints say, [b, rows, keys]."""
    assert build_backward and cu_seqlens_q is None and mask_func.is_contiguous()
    (b, rows, h, d), keys = q.shape, k.shape[1]
    assert mask_func.dtype == torch.int32 and mask_func.shape[::2] == (1, b * rows)
    assert d == v.shape[-1] == k.shape[-1] and h % k.shape[2] == 0 and b * rows * keys
    ends = mask_func[0].long()
    assert (
        len(ends) % 2 and ends.min() >= 0 and ends.max() <= keys and (ends.diff(dim=0) >= 0).all()
    )
    key = torch.arange(keys)
    mask = key < ends[0, :, None]
    for start, stop in ends[1:].unflatten(0, (-1, 2)):
        mask |= (key >= start[:, None]) & (key < stop[:, None])
    return SimpleNamespace(
        mask=mask.unflatten(0, (b, rows)).unsqueeze(1), shapes=(q.shape, k.shape)
    )


def _flex_attention_forward(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    *,
    mask_plan: Any,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> dict[str, Tensor]:
    assert return_lse and softmax_scale is not None
    assert mask_plan.shapes == (q_tensor.shape, k_tensor.shape), "a plan is of one geometry"
    given = q_tensor, k_tensor, v_tensor, mask_plan.mask
    out, lse = attended(*given, Scoring(softmax_scale))
    return {"o_tensor": out, "lse_tensor": lse}


def _flex_attention_backward(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    o_tensor: Tensor,
    do_tensor: Tensor,
    lse_tensor: Tensor,
    *,
    mask_plan: Any,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    dlse_tensor: Tensor | None = None,
) -> dict[str, Tensor]:
    assert softmax_scale is not None
    assert mask_plan.shapes == (q_tensor.shape, k_tensor.shape), "a plan is of one geometry"
    tensors = do_tensor, q_tensor, k_tensor, v_tensor, o_tensor, lse_tensor, dlse_tensor
    dq, dk, dv = gradients(BackwardOperands(*tensors), mask_plan.mask, Scoring(softmax_scale))
    return {"dq_tensor": dq, "dk_tensor": dk, "dv_tensor": dv}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    modules = []
    for name, functions in {
        "cudnn": [],
        "cudnn.flex_attention": [],
        "cudnn.flex_attention.api": [create_mask_plan],
        "cudnn.flex_attention.execution": [_flex_attention_forward, _flex_attention_backward],
    }.items():
        module: Any = ModuleType(name)
        module.__path__, module.__spec__ = [], SimpleNamespace()
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
        modules.append(module)
    for cached in (cudnn_flex.missing, cudnn_flex._function):
        cached.cache_clear()
    yield modules
    for cached in (cudnn_flex.missing, cudnn_flex._function):
        cached.cache_clear()


def check(pairs: Pairs, dims: tuple[int, int] = (8, 8), *, lse_gradient: bool = True) -> None:
    """Forward and backward equal the reference's."""
    q, k, v, dout, dlse = draw(2, pairs.q_len, pairs.k_len, 2, *dims)
    given = ForwardOperands(q, k, v)
    want = reference.forward(given, pairs, SCORING, None)
    for name, mine, his in zip(
        ("out", "lse"), cudnn_flex.forward(given, pairs, SCORING, None), want, strict=True
    ):
        assert_same(name, mine, his)
    asked = BackwardOperands(dout, q, k, v, *want, dlse if lse_gradient else None)
    wanted = reference.backward(asked, pairs, SCORING, None, deterministic=True)
    found = cudnn_flex.backward(asked, pairs, SCORING, None, deterministic=True)
    for name, mine, his in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert_same(name, mine, his)


@given(drawn=grids_of_bands(20, 20), lse_gradient=st.booleans())
@settings(
    deadline=None,
    derandomize=True,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_mask(library: Any, drawn: Any, lse_gradient: bool) -> None:
    check(Pairs(*drawn), lse_gradient=lse_gradient)


@pytest.mark.parametrize("dims", [(8, 4), (4, 8)])
def test_unequal_widths(library: Any, dims: tuple[int, int]) -> None:
    check(Pairs(as_slices([(0, 9, 0, 12, -UNBOUNDED, 3)]), 9, 12), dims)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (5, 7)])
def test_nothing_to_attend(library: Any, lengths: tuple[int, int]) -> None:
    check(Pairs(as_slices([]), *lengths))


def test_plans_are_made_once(library: Any) -> None:
    pairs = Pairs(as_slices([(0, 9, 0, 9, -UNBOUNDED, 0)]), 9, 9)
    check(pairs)
    cudnn_flex._function.cache_clear()
    library[2].create_mask_plan = None
    check(pairs)


def test_missing_says_what(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cudnn_flex.missing() is None
    cudnn_flex._function.cache_clear()
    cudnn_flex.missing.cache_clear()
    monkeypatch.setattr(library[2], "create_mask_plan", lambda mask_func, q, k, v: None)
    assert cudnn_flex.missing() == (
        "api.create_mask_plan of nvidia-cudnn-frontend does not take build_backward; version 1.32 "
        "would do"
    )
