"""Ops as users register them: one that any rank can run on its part, and one that communicates."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite

VOCAB, DIM = 32, 16


@register_op("* d^ -> * d^", name="own::rms_norm")
def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def _summed(x: Tensor, group: str) -> Tensor:
    total = x.sum(1, keepdim=True)
    if group:
        dist.all_reduce(total, group=_resolve_process_group(group))
    return total


def _backward(grad: Tensor, x: Tensor, tokens: int, group: str, result: Tensor) -> Tensor:
    return grad - _summed(grad, group) / (tokens or x.shape[1])


def _no_cost(bound: BoundAnnotation, site: SplitSite, given: Any, itemsize: int) -> InnerCost:
    return InnerCost("means", itemsize, itemsize)


@register_op(
    "b l d -> b l d",
    name="own::centre",
    rule=PartitionRule(
        {"l": Communicates(lambda site: {"tokens": site.size, "group": site.group}, _no_cost)}
    ),
    backward=_backward,
)
def centre(x: Tensor, tokens: int = 0, group: str = "") -> Tensor:
    """x less its mean over the tokens, of which all ranks have ``tokens``."""
    return x - _summed(x, group) / (tokens or x.shape[1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        x = centre(rms_norm(self.embedding(sample["tokens"])))
        logits = self.head(x)
        targets = sample["targets"].view(-1)
        return nn.functional.cross_entropy(logits.view(-1, VOCAB), targets)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()
