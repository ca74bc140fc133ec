"""A custom op: group norm over a sequence that may lie on several processes.

Each rank runs the function on its part of the tensors. By the annotation, batch `b` and groups `g`
may be cut as they are, channels `c^` may not; ranks that share `gain` add its gradients up. If `l`
is cut, a mean needs the tokens of all ranks: the rule passes their process group to the op. The
backward is derived: the function is run again under autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from annotations import Communicates, InnerCost, PartitionRule, group_named, register_op


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        ctx.group, total = group, part.clone()
        dist.all_reduce(total, group=group_named(group))
        return total

    @staticmethod  # every rank's result depends on every rank's part
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return SumOverRanks.apply(grad, ctx.group), None


def mean(x: Tensor, group: str) -> Tensor:
    """The mean over a group's channels and all tokens, including other ranks': [b, 1, g, 1]."""
    sums = torch.stack([x, torch.ones_like(x)]).sum((2, 4), keepdim=True)
    total, count = SumOverRanks.apply(sums, group) if group else sums
    return total / count


def moved(bound: Any, site: Any, arguments: Mapping[str, Any], itemsize: int) -> InnerCost:
    """Bytes for plans: 2 means of 2 sums; the backward repeats them and adds 2 gradients up."""
    sums_bytes = 4 * bound.sizes["b"] * bound.sizes["g"] * itemsize
    received = sums_bytes * 2 * (site.parts - 1) // site.parts
    return InnerCost("sums", received, 2 * received)


ALONG_L = Communicates(arguments=lambda site: {"group": site.group}, cost=moved)


@register_op(
    "b l g c^, g c^ -> b l g c^",
    name="example::group_norm",
    rule=PartitionRule(communicates={"l": ALONG_L}),
)
def group_norm(x: Tensor, gain: Tensor, group: str = "") -> Tensor:
    """Group normalisation (Wu and He, arXiv:1803.08494) over all tokens."""
    x = x - mean(x, group)
    return x * (mean(x * x, group) + 1e-5).rsqrt() * gain
