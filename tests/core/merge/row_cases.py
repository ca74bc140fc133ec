"""Rows to merge, add and copy, and the devices that can."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Of tests that run kernels. The interpreter warns of log(0), which is what is meant.
runs_kernels = (
    pytest.mark.filterwarnings("ignore:divide by zero") if INTERPRETED else pytest.mark.gpu
)
LOW = [torch.bfloat16, torch.float16, torch.float32]
EPS = {dtype: torch.finfo(dtype).eps for dtype in [*LOW, torch.float64]}
INF = torch.inf


def drawn(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def some_rows(length: int, count: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=draw)[:count]


def results(b: int, length: int, h: int, d: int, dtype: torch.dtype, seed: int):
    """out and lse of which a third of the rows attends nothing."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = drawn((b, length, h, d), dtype, seed), drawn((b, h, length), wide, seed + 1)
    nothing = drawn((b, h, length), wide, seed + 2) < -0.4
    out.masked_fill_(nothing.transpose(1, 2).unsqueeze(-1), 0.0)
    return out, lse.masked_fill_(nothing, -INF)


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(DEVICE) for t in tensors]


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)
