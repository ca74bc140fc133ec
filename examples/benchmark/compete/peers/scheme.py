"""What the peers have in common: attention with a backward of its own, and merging in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Scheme(ABC):
    """A way to compute attention over ranks; gradients flow through what a call returns."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out of this rank's rows."""
        return _Attend.apply(q, k, v, self)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """out of this rank's rows, and what the backward needs."""

    @abstractmethod
    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of this rank's tokens."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scheme: Scheme) -> Tensor:
        out, saved = scheme.forward(q, k, v)
        ctx.scheme = scheme
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.scheme.backward(dout.contiguous(), *ctx.saved_tensors), None)


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of rows whose keys came in two parts; out [1, l, h, d], fp32."""
    share = torch.sigmoid(part_lse - lse).t()[None, :, :, None]
    return torch.lerp(out, part.float(), share), torch.logaddexp(lse, part_lse)
