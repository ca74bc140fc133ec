"""Models with torch's own ops, in parallel; each is verified against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import wrap_ring_attn_func


def _plan(model: nn.Module, x: Tensor, policy: Any, lowered: bool = True) -> str:
    config = ComputeConfig(2, 2)
    given = {"x": x}
    return str(
        parallelize(model.double(), given, policy, config, verify=True, lowered=lowered).plan
    )


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Convolved(nn.Module):
    """A causal convolution along the tokens, by channel or not, then attention."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, groups=groups, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        q = y.reshape(*y.shape[:2], 2, 8)
        return wrap_ring_attn_func(q, q, q).square().mean()


def convolutions(policy: str) -> str:
    x = _randn(2, 30, 16)
    plans = [
        _plan(Convolved(groups), x, policy, lowered) for groups, lowered in ((1, True), (16, False))
    ]
    return plans[-1]


class Attention(nn.Module):
    def __init__(self, torchs: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.torchs = torchs

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (2, 8)) for t in (self.q(x), self.k(x), self.v(x)))
        if self.torchs:
            heads = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        else:
            out = wrap_ring_attn_func(q, k, v, causal=True)
        return self.o(out.flatten(2)).square().mean()


def attention() -> str:
    in_parts = {f"{name}.weight": 0 for name in "qkv"} | {"o.weight": 1}
    return _plan(Attention(True), _randn(2, 8, 16), in_parts)


def bias_of_keys() -> str:
    return _plan(Attention(False), _randn(1, 9, 16), "cp")
