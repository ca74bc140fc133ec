"""The options that say what gradients travel in, and that they must be the same run to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import op_cases
import pytest
import torch
from op_cases import Case
from op_table import TABLE
from torch import Tensor

from customized_ops.ring_attention import Layout, run_ranks, wrap_ring_attn_func
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.kernels import KERNELS, KernelError, choice

OPS = {
    "ring": TABLE["grouped 4:1"],
    "zigzag": TABLE["zigzag"],
    "varlen": TABLE["packed grouped"],
    "window": TABLE["sliding window"],
    "packed window": TABLE["sliding window, packed"],
    "streaming": TABLE["streaming"],
    "packed streaming": TABLE["streaming, packed"],
    "masked": TABLE["masked prefix"],
}
over_ops = pytest.mark.parametrize("op", OPS)


def cut(case: Case, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv over four in-process ranks."""
    return op_cases.cut(replace(case, options=tuple(options.items())), 4)


# ------------------------------------------------------------------------------- reduce_dtype


@over_ops
def test_every_op_sends_gradients_as_told(op: str) -> None:
    """In fp64, so that what was rounded shows."""
    usual, told = cut(OPS[op]), cut(OPS[op], reduce_dtype=torch.float32)
    assert torch.equal(usual[0], told[0]) and torch.equal(usual[1], told[1])
    differences = [
        ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(usual, told, strict=True)
    ]
    assert 1e-9 < max(differences[2:]) < 3e-7
    for a, b in zip(usual, cut(OPS[op], reduce_dtype=torch.float64), strict=True):
        assert torch.equal(a, b)


def test_bf16_halves_what_comes_home() -> None:
    """8 heads of 8 for 16 tokens: half the sequence of k and v, there and home."""
    q = torch.randn(1, 16, 8, 8, dtype=torch.bfloat16)
    layout = Layout.contiguous(16, 2)

    def backward_bytes(reduce_dtype: torch.dtype | None) -> list[int]:
        def body(comm: Comm) -> int:
            mine = layout.shard(q, comm.rank).clone().requires_grad_()
            options = {"causal": False, "reduce_dtype": reduce_dtype, "process_group": comm}
            out = wrap_ring_attn_func(mine, mine, mine, **options)
            before = comm.counters.received_bytes
            out.float().sum().backward()
            return comm.counters.received_bytes - before

        return run_ranks(2, body)

    elements = backward_bytes(torch.bfloat16)[0] // 4
    assert elements > 0
    assert backward_bytes(torch.bfloat16) == backward_bytes(None) == [elements * 4] * 2
    assert backward_bytes(torch.float32) == [elements * 6] * 2, "no rows move, so bf16 is usual"


# ------------------------------------------------------------------------------ deterministic


@over_ops
def test_the_same_bit_for_bit(op: str) -> None:
    case = replace(OPS[op], dtype=torch.float32)
    first, second = (cut(case, deterministic=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What "fast" is told: a kernel that is the first choice and is not deterministic."""
    asked: list[bool] = []
    torchs = KERNELS["torch"]

    def backward(*given: Any, deterministic: bool, **options: Any) -> tuple[Tensor, ...]:
        asked.append(deterministic)
        return torchs.backward(*given, **options)

    able = tuple(
        replace(each, features=tuple(f for f in each.features if f != "deterministic"))
        for each in torchs.CAPABILITIES
    )
    fast = SimpleNamespace(
        **{**vars(torchs), "NAME": "fast", "CAPABILITIES": able, "backward": backward}
    )
    monkeypatch.setattr(choice, "KERNELS", {"fast": fast, **KERNELS})
    return asked


@pytest.fixture
def torch_switch() -> Iterator[None]:
    """torch's own switch, on for a test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(**options: Any) -> list[Tensor]:
    leaves = [torch.randn(1, 6, 4, 8, requires_grad=True) for _ in range(3)]
    return list(torch.autograd.grad(wrap_ring_attn_func(*leaves, **options).sum(), leaves))


def test_a_kernel_that_is_not_is_used_only_where_none_is_asked_for(told: list[bool]) -> None:
    gradients()
    assert told == [False]
    gradients(deterministic=True)
    assert told == [False], "another kernel ran"


def test_a_named_kernel_that_is_not_is_refused(told: list[bool]) -> None:
    with pytest.raises(KernelError, match=r"has no deterministic\); able: torch, reference"):
        gradients(kernel="fast", deterministic=True)
    gradients(kernel="fast", deterministic=False)
    assert told == [False]


def test_torchs_own_switch_asks_for_it_too(told: list[bool], torch_switch: None) -> None:
    with pytest.raises(KernelError, match="has no deterministic"):
        gradients(kernel="fast")
    gradients()
    assert not told


@over_ops
def test_every_op_tells_its_kernel(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    backward = KERNELS["torch"].backward

    def spy(*given: Any, deterministic: bool, **options: Any) -> tuple[Tensor, ...]:
        asked.append(deterministic)
        return backward(*given, deterministic=deterministic, **options)

    monkeypatch.setattr(KERNELS["torch"], "backward", spy)
    for deterministic in (False, True):
        asked.clear()
        cut(OPS[op], deterministic=deterministic, kernel="torch")
        assert set(asked) == {deterministic}
