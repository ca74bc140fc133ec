"""Ops as users register them: one that any rank can run on its part, and one that communicates."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from own_ops.group_norm import SumOverRanks
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


def _mean(x: Tensor, tokens: int, group: str) -> Tensor:
    total = x.sum(1)
    return (SumOverRanks.apply(total, group) if group else total) / (tokens or x.shape[1])


def _own_backward(
    dy: Tensor | None,
    dmean: Tensor | None,
    x: Tensor,
    gain: Tensor,
    tokens: int,
    group: str,
    y: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor]:
    """From the whole gradient of the mean, on every rank."""
    dy = torch.zeros_like(y) if dy is None else dy
    dmean = torch.zeros_like(mean) if dmean is None else dmean
    if group:
        dmean = dmean / dist.get_world_size(_resolve_process_group(group))
    dm = _mean((dmean * gain - (dy * gain).sum(1))[:, None], tokens or x.shape[1], group)
    centred = x - _mean(x, tokens, group)[:, None]
    return dy * gain + dm[:, None], (dy * centred).sum((0, 1)) + (dmean * mean / gain).sum(0)


def _rule(whole: bool) -> PartitionRule:
    def told(site: SplitSite) -> dict[str, Any]:
        return {"tokens": site.size, "group": site.group}

    return PartitionRule({"l": Communicates(told, _no_cost, whole_gradients=whole)})


@register_op("b l d^ -> b d^", name="own::average", rule=_rule(False))
def average(x: Tensor, tokens: int = 0, group: str = "") -> Tensor:
    """The mean over all ranks' tokens, whole on each."""
    return _mean(x, tokens, group)


@register_op("b l d^, d^ -> b l d^, b d^", name="own::centre_and_mean", rule=_rule(False))
def centre_and_mean(
    x: Tensor, gain: Tensor, tokens: int = 0, group: str = ""
) -> tuple[Tensor, Tensor]:
    """One result that is cut and one that is whole."""
    m = _mean(x, tokens, group)
    return (x - m[:, None]) * gain, m * gain


@register_op(
    "b l d^, d^ -> b l d^, b d^",
    name="own::centre_and_mean_whole",
    rule=_rule(True),
    backward=_own_backward,
)
def centre_and_mean_whole(
    x: Tensor, gain: Tensor, tokens: int = 0, group: str = ""
) -> tuple[Tensor, Tensor]:
    """The same, with a backward that takes whole gradients."""
    m = _mean(x, tokens, group)
    return (x - m[:, None]) * gain, m * gain


class Means(nn.Module):
    """A loss of some of the results of an op above, by name: a tracer sees calls of globals."""

    def __init__(self, op: str, used: tuple[int, ...]) -> None:
        super().__init__()
        self.op, self.used = op, used
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.gain = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        x = self.embedding(sample["tokens"])
        if self.op == "average":
            m = average(x) - self.gain
            return (m * m).sum()
        if self.op == "centre_and_mean":
            y, m = centre_and_mean(x, self.gain)
        else:
            y, m = centre_and_mean_whole(x, self.gain)
        if self.used == (0,):
            return (y * y * y).sum()
        return (m * m).sum() if self.used == (1,) else (y * y * y).sum() + (m * m).sum()


def means(op: str, used: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return Means(op, used).double()


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
