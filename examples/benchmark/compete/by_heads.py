"""All-to-all around a call: tokens become heads, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.compete.peers.ulysses import to_heads, to_tokens

Call = Callable[..., Tensor]


class Heads(torch.autograd.Function):
    """[1, own tokens, heads, ...] to [1, all tokens, own heads, ...]; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: bool) -> Tensor:
        ctx.back = back
        return to_tokens(x, dist.group.WORLD) if back else to_heads(x, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Heads.forward(ctx, grads[0], not ctx.back), None


class Gather(torch.autograd.Function):
    """[1, own tokens, ...] of all ranks; its gradient is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.new_empty(dist.get_world_size() * x.shape[1], *x.shape[2:])
        dist.all_gather_into_tensor(whole, x.squeeze(0).contiguous())
        return whole[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        whole = grads[0].squeeze(0).contiguous()
        own = torch.empty_like(whole[: len(whole) // dist.get_world_size()])
        dist.reduce_scatter_tensor(own, whole)
        return own[None]


def by_heads(whole: Call) -> Call:
    """All-to-all around a call with all tokens and some heads."""

    def call(*given: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        moved = [Gather.apply(x) if x.shape[2] < ranks else Heads.apply(x, False) for x in given]
        return Heads.apply(whole(*moved), True)

    return call
