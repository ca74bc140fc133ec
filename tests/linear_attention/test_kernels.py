"""The kernels: which is taken, and the adapter of flash-linear-attention through a stand-in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import TestCase

import fla_library as stand_in
import numpy as np
import pytest
import recurrent_jobs
import torch
from linear_cases import LinearCase
from torch._subclasses.fake_tensor import FakeTensorMode

from annotations import ComputeConfig
from annotations.engines.torch import plan_without_ranks
from customized_ops.along_sequence import fla_library
from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from customized_ops.linear_attention.kernels import (
    CHOICE,
    KERNELS,
    Operands,
    fla,
    fla_calls,
    torch_chunks,
)
from customized_ops.ring_attention import KernelError

KINDS = [(delta, channels) for delta in (True, False) for channels in (True, False)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    cached = fla_calls.function_of, fla.missing, fla.steps_known
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def operands(delta: bool, channels: bool, ends: tuple[int, ...]) -> Operands:
    case = LinearCase(ends[-1], delta, channels, heads=(2, 4), states="")
    given = {"beta": None, **{name: t.detach() for name, t in case.given.items()}}
    return Operands(**given, ends=np.array(ends), scale=0.5)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("delta", "channels"), KINDS)
@pytest.mark.parametrize("ends", [(0, 7), (0, 3, 4, 9), (0,)])
@pytest.mark.parametrize("states", [True, False])
def test_the_adapter_is_the_torch_kernel(
    library: None, delta: bool, channels: bool, ends: tuple[int, ...], states: bool
) -> None:
    x = operands(delta, channels, ends)
    draw = torch.Generator().manual_seed(1)
    shape = (len(ends) - 1, 2, 4, 3, 2)
    initial, dfinal = torch.randn(2, *shape, generator=draw, dtype=torch.float64).unbind(0)
    dout = torch.randn(x.v.shape, generator=draw, dtype=torch.float64)
    given = (initial, dfinal) if states else (None, None)
    results = []
    for kernel in (fla, torch_chunks):
        forward = kernel.forward(x)
        assert forward.kept().shape == (*x.v.shape[:3], kernel.kept_width(x))
        backward = kernel.backward(x, given[0], forward.kept(), dout)
        final, _ = forward.states(given[0]), backward.initial(given[1])
        matrices = forward.matrices() if delta else None
        results.append([forward.out(), final, matrices, *backward.gradients({})])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.allclose(found, expected, atol=1e-12)


def test_a_library_with_other_arguments_is_missing(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fla.missing() is None
    fla.missing.cache_clear()
    other = lambda q, k, v, g, beta, scale, initial_state: None  # noqa: E731
    monkeypatch.setattr(sys.modules["fla.ops.kda"], "chunk_kda", other)
    fla_calls.function_of.cache_clear()
    assert fla.missing() == (
        "chunk_kda of flash-linear-attention does not take output_final_state, cu_seqlens"
    )


def test_what_auto_leaves_to_the_library(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(dv: int, dtype: torch.dtype) -> Operands:
        q, v = torch.zeros(1, 5, 2, 128, dtype=dtype), torch.zeros(1, 5, 4, dv, dtype=dtype)
        return Operands(q, q, v, v[..., 0].float(), v[..., 0], np.array([0, 5]), 1.0)

    low = tokens(128, torch.bfloat16)
    monkeypatch.setattr(fla, "uncompared", fla_library.uncompared.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(fla_library, "triton_version", lambda: (3, 7, 0))
    assert fla.unproven(low) == "compared with version 0.6.0 alone"
    monkeypatch.setattr(sys.modules["fla"], "__version__", "0.6.0", raising=False)
    assert fla.unproven(low) == "compared on Hopper alone"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert fla.unproven(low) == "compared with Triton 3.7.1, not 3.7.0"
    monkeypatch.setattr(fla_library, "triton_version", lambda: (3, 7, 1))
    assert fla.unproven(low) is None
    assert fla.unproven(tokens(128, torch.float16)) == "compared in bfloat16 alone"
    assert fla.unproven(replace(low, g=low.v)) == "compared as it is for a decay a head alone"
    narrow = tokens(64, torch.bfloat16)
    assert fla.unproven(narrow) == "compared at dk, dv = (128, 128), not (128, 64)"
    gates = [fla.unproven(replace(x, beta=None)) for x in (low, narrow)]
    assert gates == ["compared at dk, dv = (128, 64), not (128, 128)", None]


@pytest.mark.parametrize(
    ("found", "narrow", "wide"),
    [
        ((3, 6, 0), "needs Triton 3.7.1 or later on Hopper, not 3.6.0", True),
        ((3, 7, 1), "takes dk and dv of at least 64 on Hopper", False),
    ],
)
def test_what_triton_compiles_wrongly(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, ...], narrow: str, wide: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fla, "triton_version", lambda: found)
    of = fla.miscompiled.__wrapped__
    assert of(True) == narrow and (of(False) == narrow) == wide


def test_auto_says_why() -> None:
    x = operands(True, False, (0, 5))
    with TestCase().assertLogs("seqshard", logging.INFO) as logged:
        assert CHOICE.choose("an op of this test", "auto", x, x.q) is torch_chunks
        assert CHOICE.choose("an op of this test", "auto", x, x.q) is torch_chunks
    assert [record.getMessage() for record in logged.records] == [
        "an op of this test, torch.float64 on cpu: kernel torch (fla: runs on cuda, not cpu)"
    ]


def test_what_a_kernel_refuses() -> None:
    x = operands(True, False, (0, 5))
    with pytest.raises(KernelError, match=r"'fla' cannot do this \(runs on cuda.*able: torch"):
        CHOICE.choose("op", "fla", x, x.q)
    with pytest.raises(KernelError, match="'fast' is unknown; known: auto, fla, torch"):
        given = {name: t.detach() for name, t in LinearCase(4, states="").given.items()}
        wrap_gated_delta_rule_func(**given, kernel="fast")
    on_gpu = replace(x, q=x.q.to("meta"))
    assert fla.refuses(on_gpu) == "runs on cuda, not meta"
    assert set(KERNELS) == {"fla", "torch"}


@pytest.mark.parametrize(
    ("delta", "dims", "reason"),
    [
        (False, (64, 65), "takes even dk and dv of gates alone, not 64 and 65"),
        (True, (64, 65), None),
        (True, (320, 64), "takes dk of at most 256, not 320"),
    ],
)
def test_widths_that_the_library_has_not(
    delta: bool, dims: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla, "miscompiled", lambda _: None)
    with FakeTensorMode():
        q, v = (torch.empty(1, 8, 2, d, device="cuda", dtype=torch.float16) for d in dims)
        gate = torch.empty(1, 8, 2, device="cuda")
        x = Operands(q, q, v, gate, gate if delta else None, np.array([0, 8]), 1.0)
        assert fla.refuses(x) == reason


@pytest.mark.parametrize("delta", [False, True])
def test_a_kernel_of_gpus_is_planned_without_one(delta: bool) -> None:
    """By shapes alone, wherever the plan is made; also where the library is missing."""
    q, v = (torch.empty(1, 8, heads, 4, device="meta", dtype=torch.bfloat16) for heads in (2, 4))
    g = torch.empty(1, 8, 4, device="meta")
    wrap = wrap_gated_delta_rule_func if delta else wrap_gated_linear_attn_func
    out = wrap(q, q, v, *[g] * (1 + delta), kernel="fla")
    assert out.shape == v.shape


@pytest.mark.parametrize(("offset", "width"), [(0, 16), (1, 16), (4, 16), (0, 3)])
def test_repeated_heads(offset: int, width: int) -> None:
    """Also of memory that does not begin where eight bytes do."""
    memory = torch.arange(offset + 2 * 3 * 2 * width, dtype=torch.bfloat16)
    x = memory[offset:].view(2, 3, 2, width)
    assert torch.equal(fla_calls.repeated(x, 3), x.repeat_interleave(3, 2))


def test_plans_count_what_a_kernel_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the backward: [b, l, hv, c] in v's dtype, of which a rank has its part."""
    monkeypatch.setattr(recurrent_jobs, "device", lambda: "cpu")
    given, model = recurrent_jobs.inputs(1, 24), recurrent_jobs.Hybrid("d")

    def held() -> int:
        plan = plan_without_ranks(model, given, "cp", ComputeConfig(2, 2))
        assert plan.held is not None
        return plan.held.activations

    before = held()
    monkeypatch.setattr(torch_chunks, "kept_width", lambda x: 10)
    assert held() - before == 24 * 4 * 10 * 8 // 2
