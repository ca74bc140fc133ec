"""Which functions nnscaler knows, what it sees of a call, and which calls are refused."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from nnscaler.graph.parser.register import CustomizedOps
from torch import Tensor

import customized_ops.ring_attention as public
from annotations.codegen.public_call import declared_calls, qualified
from annotations.engines import nnscaler as engine
from customized_ops.ring_attention.core.kernels import KERNELS
from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import training
from on_nnscaler.support import jobs

pytestmark = pytest.mark.nnscaler

FUNCTIONS = [getattr(public, name) for name in public.__all__ if name.startswith("wrap_")]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_is_registered_under_its_own_name(function: Any) -> None:
    name = f"{function.__module__}.{function.__name__}"
    assert name.startswith("customized_ops.ring_attention.") and name.count(".") == 3
    assert CustomizedOps.kOpMap[name] is engine.make_node
    assert CustomizedOps.kOpEmit[name] is engine.emit
    assert CustomizedOps.kOpRuntime[f"{name}.traced"] is function


def test_registering_again_does_nothing() -> None:
    engine.register()  # other tests may have declared ops since the first time
    before = dict(CustomizedOps.kOpMap)
    engine.register()
    assert importlib.import_module("annotations.engines.nnscaler") is engine
    assert CustomizedOps.kOpMap == before


def test_a_script_run_again_by_multiprocessing_has_its_own_name() -> None:
    def op() -> None: ...

    for module, name in (("__mp_main__", "__main__.op"), ("package.module", "package.module.op")):
        op.__module__ = module
        assert qualified(op) == name


def test_what_is_declared_later_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from annotations.codegen import public_call as calls

    def attend_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    known = declared_calls()["customized_ops.ring_attention.ring_attn.wrap_ring_attn_func"]
    call = calls.PublicCall(attend_later, known.op, known.outputs, known.arguments)
    monkeypatch.setattr(calls, "_calls", dict(calls._calls))
    calls.declare_call(call)
    try:
        assert CustomizedOps.kOpRuntime[f"{call.name}.traced"] is attend_later
    finally:  # nnscaler looks for all that it knows when it traces
        for name in (call.name, f"{call.name}.traced"):
            for registry in (CustomizedOps.kOpMap, CustomizedOps.kOpRuntime):
                del registry[name]


def q_k_v(packed: bool) -> dict[str, Tensor]:
    lead = (16,) if packed else (2, 16)
    g = torch.Generator().manual_seed(0)
    heads = {"q": (4, 8), "k": (2, 8), "v": (2, 6)}
    return {n: torch.randn(*lead, *s, generator=g, requires_grad=True) for n, s in heads.items()}


CU = torch.tensor([0, 8, 16], dtype=torch.int32)
MASK = public.AttnMask.causal(16)
CALLS: dict[str, Any] = {
    "ring": partial(public.wrap_ring_attn_func, **q_k_v(False)),
    "zigzag": partial(public.wrap_zigzag_attn_func, **q_k_v(False)),
    "varlen": partial(
        public.wrap_ring_attn_varlen_func,
        **q_k_v(True), cu_seqlens_q=CU, cu_seqlens_k=CU, alibi_slopes=None, causal=True,
    ),
    "window": partial(public.wrap_sliding_window_attn_func, **q_k_v(False), window_size=(4, 0)),
    "packed window": partial(
        public.wrap_sliding_window_attn_func,
        **q_k_v(True), cu_seqlens_q=CU, cu_seqlens_k=CU, window_size=(4, 0),
    ),
    "streaming": partial(
        public.wrap_streaming_attn_func, **q_k_v(False), window=4, sink_tokens=1
    ),
    "packed streaming": partial(
        public.wrap_streaming_attn_func, **q_k_v(True), window=4, sink_tokens=1, cu_seqlens=CU
    ),
    "masked": partial(public.wrap_masked_attn_func, **q_k_v(False), mask=MASK),
}  # fmt: skip
MOVES: dict[str, Any] = {
    "shuffle": partial(public.wrap_shuffle_func, q_k_v(False)["q"], "zigzag"),
    "unshuffle": partial(public.wrap_unshuffle_func, q_k_v(False)["q"], "zigzag"),
    "shard": partial(public.wrap_shard_func, q_k_v(False)["q"], "zigzag"),
    "unshard": partial(public.wrap_unshard_func, q_k_v(False)["q"], "zigzag"),
    "roll": partial(public.wrap_roll_func, q_k_v(False)["q"], 1),
    "maybe shuffle": partial(public.wrap_maybe_shuffle, q_k_v(True)["q"], CU),
    "maybe unshuffle": partial(public.wrap_maybe_unshuffle, q_k_v(True)["q"], CU),
}


def assert_fake_is_like_real(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{call.func.__module__}.{call.func.__name__}.traced"
    real = call()
    with monkeypatch.context() as patched:
        for kernel in KERNELS.values():
            patched.setattr(kernel, "forward", None)  # nothing is computed
        fake = CustomizedOps.kOpFakeRuntime[name](*call.args, **call.keywords)
    assert isinstance(fake, tuple) == isinstance(real, tuple)
    pairs = [(fake, real)] if isinstance(real, Tensor) else list(zip(fake, real, strict=True))
    for one, other in pairs:
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert one.requires_grad == other.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", CALLS)
def test_fakes_of_attention(
    name: str, options: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS[name]
    tensors = {n: call.keywords[n].detach().to(dtype) for n in "qkv"}
    frozen = partial(call.func, **{**call.keywords, **tensors, **options})
    learning = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    for one in (frozen, partial(frozen, **learning), partial(frozen, v=learning["v"])):
        assert_fake_is_like_real(one, monkeypatch)


@pytest.mark.parametrize("name", MOVES)
def test_fakes_of_moves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fake_is_like_real(MOVES[name], monkeypatch)


def test_a_group_of_the_users_own_is_dropped(tmp_path: Path) -> None:
    with TestCase().assertLogs(engine.__name__, logging.WARNING) as logged:
        codes = jobs.generate(training(models.ring_with_a_group, plan=2), tmp_path, ranks=2)
    assert [models.groups_of(code) for code in codes] == 2 * [{(0, 1)}]
    name = "customized_ops.ring_attention.ring_attn.wrap_ring_attn_func"
    said = f"{name}: process_group is the engine's to fill in; dropped"
    assert [record.getMessage() for record in logged.records].count(said) == 2


def test_no_ring(tmp_path: Path) -> None:
    job = training(models.varlen_without_ring, plan=2)
    with pytest.raises(NotImplementedError) as raised:
        jobs.generate(job, tmp_path, ranks=2)
    assert str(raised.value) == (
        "wrap_ring_attn_varlen_func: enable_ring=False is not supported in a captured graph, where "
        "an engine gives the op its group"
    )
