"""The adapter of flash-linear-attention's convolution: on a stand-in for it, and on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from conv_cases import ConvCase, check
from torch import Tensor

from customized_ops.along_sequence import fla_library
from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.causal_conv1d.kernels import CHOICE, Request, dao, fla
from customized_ops.ring_attention import KernelError, Layout, run_ranks

ONE = ConvCase(23, activation="silu")
PACKED = ConvCase(batch=1, lengths=(1, 9, 0, 2, 1, 140, 0), activation="silu")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Each packed sequence by itself, as a convolution of torch; a batch of 1 if there are some."""
    parts = [x]
    if cu_seqlens is not None:
        assert x.shape[0] == 1
        assert chunk_indices is not None
        chunks = [
            [n, c]
            for n, part in enumerate(cu_seqlens.diff().tolist())
            for c in range(-(-part // 64))
        ]
        assert chunk_indices.tolist() == chunks
        parts = [x[:, a:b] for a, b in pairwise(cu_seqlens.tolist())]
    width = weight.shape[1]
    padded = (torch.nn.functional.pad(part.mT, (width - 1, 0)) for part in parts)
    whole = [
        torch.nn.functional.conv1d(part, weight.unsqueeze(1), bias, groups=len(weight)).mT
        for part in padded
    ]
    y = torch.cat(whole, 1)
    return torch.nn.functional.silu(y) if activation else y, None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The same of channels in dim 1, and a number for each token, as Dao-AILab's kernel has it."""
    b, d, n = x.shape
    assert d % 8 == 0 and weight.shape[1] in (2, 3, 4)
    assert x.stride(1) == 1 and x.stride(2) % 8 == x.stride(0) % 8 == 0
    lengths = chunks = None
    if seq_idx is not None:
        assert seq_idx.shape == (b, n) and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        assert (seq_idx == seq_idx[0]).all()
        count = torch.unique_consecutive(seq_idx[0], return_counts=True)[1]
        lengths = torch.cat([count.new_zeros(1), count.repeat(b).cumsum(0)])
        chunks = torch.tensor(
            [[m, c] for m, k in enumerate((-(-lengths.diff() // 64)).tolist()) for c in range(k)]
        )
        x = x.mT.reshape(1, b * n, d).mT
    y = causal_conv1d(x.mT, weight, bias, activation, lengths, chunks)[0]
    return y.reshape(b, n, d).mT


@pytest.fixture
def dao_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("causal_conv1d")
    module.causal_conv1d_fn = causal_conv1d_fn
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    for cached in (dao._function, dao.missing):
        cached.cache_clear()
    yield
    for cached in (dao._function, dao.missing):
        cached.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module: Any = ModuleType("fla.modules.causal_conv1d")
    module.causal_conv1d = causal_conv1d
    for name in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla"].__version__ = "0.7"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for cached in (fla._function, fla.missing):
        cached.cache_clear()
    yield module
    for cached in (fla._function, fla.missing):
        cached.cache_clear()


@pytest.mark.parametrize("adapter", [fla, dao], ids=lambda adapter: adapter.NAME)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_adapter(
    library: ModuleType,
    dao_library: None,
    monkeypatch: pytest.MonkeyPatch,
    adapter: ModuleType,
    layout: str,
    ranks: int,
) -> None:
    """Several runs of a batch, packed documents, and halos."""
    monkeypatch.setattr(adapter, "of_gpus_alone", lambda x: None)
    for case in (ONE, PACKED):
        case = replace(case, layout=layout, kernel=adapter.NAME, channels=8)
        check(case, case.in_process(ranks), case.expected())


def test_choice(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(1, 4, 2), torch.zeros(2, 3)
    given = Request(x, weight)
    assert CHOICE.choose("op", "auto", given, x).NAME == "torch"
    assert dao.unproven(given) == "compared on Hopper alone"
    assert dao.refuses(given) == "takes multiples of 8 channels, not 2"
    assert dao.refuses(Request(x, torch.zeros(8, 5))) == "takes widths of 2 to 4, not 5"
    assert dao.refuses(Request(x, torch.zeros(8, 4))) == "runs on GPUs, not on cpu"
    with pytest.raises(KernelError, match=r"'fla' cannot do this \(runs on GPUs.*able: torch"):
        wrap_causal_conv1d_func(x, weight, kernel="fla")
    with pytest.raises(
        KernelError, match="'fast' is unknown; known: auto, fla, causal_conv1d, torch"
    ):
        wrap_causal_conv1d_func(x, weight, kernel="fast")
    for adapter in (fla, dao):
        half = adapter.unproven(Request(x.half(), weight))
        assert half == "compared in float32 and bfloat16 alone"
    monkeypatch.setattr(fla, "uncompared", fla_library.uncompared.__wrapped__)
    assert fla.unproven(given) == "compared with version 0.6.0 alone"
    monkeypatch.setattr(sys.modules["fla"], "__version__", "0.6.0")
    assert fla.unproven(given) == "compared on Hopper alone"
    fla.missing.cache_clear()
    fla._function.cache_clear()
    monkeypatch.setattr(library, "causal_conv1d", lambda x, weight, bias: None)
    assert "does not take activation, cu_seqlens, chunk_indices" in str(fla.missing())


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", [fla, dao], ids=lambda adapter: adapter.NAME)
@pytest.mark.parametrize("packed", [False, True])
def test_one_gpu(adapter: ModuleType, packed: bool) -> None:
    """In fp32, and in bf16 with an fp32 filter, against the plain kernel in fp64."""
    if (missing := adapter.missing()) is not None:
        pytest.skip(missing)
    draw = torch.Generator("cuda").manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(size, generator=draw, device="cuda")
        for size in ((1, 300, 96), (96, 4), (96,), (1, 300, 96))
    )
    lengths = [0, 1, 131, 131, 195, 300] if packed else None

    def found(dtype: torch.dtype, wide: torch.dtype, kernel: str) -> list[Tensor]:
        leaves = [t.to(d).requires_grad_() for t, d in ((x, dtype), (weight, wide), (bias, wide))]
        y = wrap_causal_conv1d_func(*leaves, "silu", lengths, kernel=kernel)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    x, dy = x.bfloat16().float(), dy.bfloat16().float()
    truth = found(torch.float64, torch.float64, "torch")
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for value, exact in zip(found(dtype, torch.float32, adapter.NAME), truth, strict=True):
            assert (value - exact).norm() <= bound * exact.norm()


def test_a_kernel_that_cannot_is_refused_before_anything_is_sent(library: ModuleType) -> None:
    x, weight = torch.randn(1, 16, 4), torch.randn(4, 4)

    def rank(comm: Any) -> int:
        mine = x.chunk(2, 1)[comm.rank]
        with pytest.raises(KernelError, match="runs on GPUs, not on cpu"):
            wrap_causal_conv1d_func(mine, weight, kernel="fla", process_group=comm)
        return int(comm.counters.received_bytes)

    assert run_ranks(2, rank) == [0, 0]


def test_documents_that_were_first_met_in_inference(library: ModuleType) -> None:
    """Tables of them are kept, and autograd saves some later."""
    layout = Layout.zigzag(23, 2)

    def rank(comm: Any) -> Tensor:
        x = layout.shard(torch.ones(1, 23, 4), comm.rank)
        where = {"cu_seqlens": [0, 9, 23], "layout": layout, "process_group": comm}
        with torch.inference_mode():
            wrap_causal_conv1d_func(x, torch.ones(4, 3), **where)
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            wrap_causal_conv1d_func(leaf, torch.ones(4, 3), **where).sum(), leaf
        )
        return grad

    assert layout.unshard(run_ranks(2, rank)).max() == 3
