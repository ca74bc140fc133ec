"""Measured speeds of kernels, and the class of a mask's shape that they are filed under."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.kernels.speeds import (
    SHAPE_CLASSES,
    SPEEDS,
    bucket,
    fastest_first,
    needs_window,
    seconds,
    shape_class,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import K0, LO, Q1, clip
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.over_buffers import over_buffers

from .choice_cases import CPU, GPU

# ------------------------------------------------------------------------------- speeds


def test_seconds_are_those_of_the_nearest_length_measured() -> None:
    figures = SPEEDS["flash4"]["causal"]
    short, near, far = ((1 / f + 2.5 / b) for f, b in (figures[n] for n in (2048, 8192, 32768)))
    assert len({short, near, far}) == 3
    for tokens, want in ((0, short), (4000, short), (4200, near), (16000, near)):
        assert seconds("flash4", replace(GPU, tokens=tokens)) == want
    for tokens in (17000, 1 << 20):
        assert seconds("flash4", replace(GPU, tokens=tokens)) == far
    full = replace(GPU, shape_class="full")
    assert seconds("cudnn", full) == seconds("cudnn", replace(full, shape_class="causal"))


def test_what_was_not_measured_has_no_figure() -> None:
    assert np.isinf(seconds("cudnn", replace(GPU, shape_class="window")))
    assert np.isinf(seconds("unheard of", GPU))
    assert np.isinf(seconds("flash4", CPU))
    assert np.isinf(seconds("flex", replace(GPU, dtype=torch.float32)))


@pytest.mark.parametrize("tokens", [0, 8192, 1 << 20])
@pytest.mark.parametrize("shape", SHAPE_CLASSES)
def test_order_of_what_is_measured_and_of_what_is_not(shape: str, tokens: int) -> None:
    request = replace(GPU, shape_class=shape, tokens=tokens)
    order = fastest_first(KERNELS, request)
    assert sorted(order) == sorted(KERNELS) and order[-1] == "reference"
    assert shape == "sparse" or order[0] == "flash4"
    for anywhere in (replace(request, dtype=torch.float32), replace(request, device=CPU.device)):
        assert fastest_first(KERNELS, anywhere) == list(KERNELS)


def test_what_was_not_measured_is_no_faster_than_those_before_it() -> None:
    first, slow, fast = "unheard of", "torch", "flash4"
    assert fastest_first([first, slow, "unknown", fast], GPU) == [first, fast, slow, "unknown"]
    assert fastest_first([fast, "unknown", slow, "last"], GPU) == [fast, "unknown", slow, "last"]


def test_a_kernel_that_is_hardly_faster_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"a": 100, "b": 104, "c": 106, "d": 90}
    figures = {name: {"causal": {8192: (x, x)}} for name, x in speeds.items()}
    monkeypatch.setattr("customized_ops.ring_attention.core.kernels.speeds.SPEEDS", figures)
    assert fastest_first("abcd", GPU) == ["c", "a", "b", "d"]


def test_figures_are_of_known_classes() -> None:
    for figures in SPEEDS.values():
        assert set(figures) <= set(SHAPE_CLASSES)
        assert all(measured for measured in figures.values())


@given(st.integers(1, 1 << 30))
@settings(deadline=None, derandomize=True)
def test_buckets_are_near(tokens: int) -> None:
    assert 2**-0.5 <= bucket(tokens) / tokens <= 2**0.5
    assert bucket(0) == 0 and bucket(bucket(tokens)) == bucket(tokens)


# -------------------------------------------------------------------------- shape class


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (AttnMask.full(20, 30), "full"),
        (AttnMask.full(0, 0), "full"),
        (AttnMask.causal(1), "full"),
        (AttnMask.dense(20, window=(-1, 19)), "full"),
        (AttnMask.causal(20), "causal"),
        (AttnMask.causal(20, 30), "causal"),
        (AttnMask.dense(20, window=(19, 0)), "causal"),
        (AttnMask.varlen([0, 7, 20]), "packed"),
        (AttnMask.varlen([0, 7, 20], [0, 3, 9], causal=True), "packed"),
        (AttnMask.varlen([0, 0, 20], causal=True), "causal"),
        (AttnMask.dense(20, window=(5, 0)), "window"),
        (AttnMask.dense(20, window=(5, -1)), "window"),
        (AttnMask.varlen([0, 4, 20], causal=True, window=(5, 0)), "window"),
        (AttnMask.varlen([0, 4, 9], causal=True, window=(5, 0)), "packed"),
        (AttnMask.streaming(40, window=5, sink=2), "sparse"),
        (AttnMask.prefix_lm(40, prefix=7), "sparse"),
    ],
)
def test_shape_class(mask: AttnMask, name: str) -> None:
    assert shape_class(mask) == name
    assert name in SHAPE_CLASSES
    if name in ("full", "causal", "packed", "window"):
        assert needs_window(mask) == (name == "window")


def test_windows_beside_other_slices_are_still_windows() -> None:
    assert needs_window(AttnMask.streaming(40, window=5, sink=2))
    assert not needs_window(AttnMask.prefix_lm(40, prefix=7))


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_pieces_of_a_mask_without_windows_need_none(data: st.DataObject) -> None:
    """Clipped anywhere, and laid out over ranks in any of three ways."""
    n = data.draw(st.integers(1, 60))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    hi = data.draw(st.integers(0, n))
    masks = [AttnMask.varlen([0, *cuts, n], window=(-1, hi)), AttnMask.prefix_lm(n, prefix=n // 2)]
    mask = data.draw(st.sampled_from(masks))
    assert not needs_window(mask)
    ends = sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
    key_ends = sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
    assert_no_lo_binds(clip(mask.slices, *ends, *key_ends))
    layout = data.draw(
        st.sampled_from(
            [Layout.contiguous(n, 3), Layout.striped(n, 3, block=2), Layout.zigzag(n, 3)]
        )
    )
    plan = make_plan(mask, layout, stages=data.draw(st.integers(0, 2)))
    for rank in range(3):
        for stage in plan.rank(rank).stages:
            assert_no_lo_binds(stage.own)
            assert_no_lo_binds(stage.remote)


def assert_no_lo_binds(slices: np.ndarray) -> None:
    assert (slices[:, LO] <= slices[:, K0] - slices[:, Q1] + 1).all()


def test_a_bound_below_is_noticed() -> None:
    places = np.array([[0, 20, 0]])
    slices = over_buffers(AttnMask.dense(20, window=(5, 0)).slices, places, places)
    with pytest.raises(AssertionError):
        assert_no_lo_binds(slices)
