"""A model whose tokens are mixed by a convolution and a recurrence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func


class Recurrent(nn.Module):
    """``{"x": [b, l, 8], "cu_seqlens": [documents + 1]}`` to a loss."""

    def __init__(self, delta: bool) -> None:
        super().__init__()
        self.delta = delta
        self.up, self.gates, self.written = nn.Linear(8, 24), nn.Linear(8, 4), nn.Linear(8, 4)
        self.filter, self.bias = nn.Parameter(torch.randn(24, 4)), nn.Parameter(torch.randn(24))
        self.down = nn.Linear(8, 8)

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        x, cu_seqlens = sample["x"], sample["cu_seqlens"]
        y = wrap_causal_conv1d_func(self.up(x), self.filter, self.bias, "silu", cu_seqlens)
        q, k, v = y.split(8, -1)
        q, k, v = q.unflatten(-1, (2, 4)), k.unflatten(-1, (2, 4)), v.unflatten(-1, (4, 2))
        g = F.logsigmoid(self.gates(x))
        if self.delta:
            beta = torch.sigmoid(self.written(x)) * 0.2
            out = wrap_gated_delta_rule_func(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        else:
            out = wrap_gated_linear_attn_func(q, k, v, g, cu_seqlens=cu_seqlens)
            out = out + self.written(x).unsqueeze(-1)
        return self.down(out.flatten(2)).square().mean()


def _recurrent(delta: bool) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(delta).double()


def recurrent(delta: bool) -> Any:
    return partial(_recurrent, delta)


def batch(seed: int) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 12, 8, generator=draw, dtype=torch.float64)
    return {"sample": {"x": x, "cu_seqlens": torch.tensor([0, 2, 9, 12])}}
