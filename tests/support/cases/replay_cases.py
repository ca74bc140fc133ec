"""Plans whose passes come again and again, and what they attend."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan

HEADS, DIM, V_DIM, BATCH = (4, 2), 8, 6, 2

CAUSAL = AttnMask.dense(64, causal=True)
STRIPED = Layout.striped(64, 4, block=4)
SPLIT: dict[str, Any] = {"heads": HEADS, "assignment": "balanced"}
PLANS = {
    "zigzag": make_plan(CAUSAL, Layout.zigzag(64, 2), stages=1, heads=HEADS),
    "gathered": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=0, **SPLIT),
    "staged": make_plan(CAUSAL, Layout.contiguous(64, 4), stages=3, **SPLIT),
    "scattered": make_plan(CAUSAL, STRIPED, stages=1, heads=HEADS, assignment="owner"),
    "teams": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=1, team_size=2, **SPLIT),
    "groups of heads": make_plan(CAUSAL, STRIPED, stages=1, head_groups=2, **SPLIT),
    "rows of several ranks": make_plan(
        AttnMask.dense(4, 128),
        Layout.contiguous(4, 4),
        Layout.contiguous(128, 4),
        assignment="nearest",
    ),
    "uneven": make_plan(CAUSAL, Layout.from_sizes([7, 0, 30, 27]), heads=HEADS),
}


def kernel(name: str = "reference", *, recorded: bool = True) -> Any:
    """One that may be recorded, or may not."""
    module = KERNELS[name]
    made = SimpleNamespace(NAME=name, forward=module.forward, backward=module.backward)
    if recorded:
        made.watched, made.unproven_tapes = nullcontext, lambda: None
    return made


def draw(
    mask: AttnMask, seed: int, dtype: torch.dtype = torch.float64, v_dim: int = V_DIM
) -> list[Tensor]:
    """q, k, v, dout, Gaussian."""
    source = torch.Generator().manual_seed(seed)
    (h, g), q_len, k_len = HEADS, mask.q_len, mask.k_len
    sizes = [(q_len, h, DIM), (k_len, g, DIM), (k_len, g, v_dim), (q_len, h, v_dim)]
    return [
        torch.randn((BATCH, *s), dtype=torch.float64, generator=source).to(dtype) for s in sizes
    ]
