"""Models that end in the chunked loss, and one with ops that a user registered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy

VOCAB, DIM = 32, 16


class WithLoss(nn.Module):
    """``{"tokens": [b, l], "targets": [b, l]}`` to a loss; some targets are left out."""

    def __init__(self, reduction: str, biased: bool, groups: dict[str, Any]) -> None:
        super().__init__()
        self.reduction, self.groups = reduction, groups
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.up = nn.Linear(DIM, DIM)
        self.head = nn.Parameter(torch.randn(VOCAB, DIM) / 4)
        self.bias = nn.Parameter(torch.randn(VOCAB)) if biased else None

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        x = self.up(self.embedding(sample["tokens"]))
        loss = chunk_linear_cross_entropy(
            x,
            self.head,
            sample["targets"],
            bias=self.bias,
            reduction=self.reduction,
            chunk_size=3,
            **self.groups,
        )
        return loss.sum() if self.reduction == "none" else loss


def _with_loss(reduction: str, biased: bool, groups: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return WithLoss(reduction, biased, groups).double()


def with_loss(reduction: str, biased: bool = False, **groups: Any) -> Callable[[], nn.Module]:
    """``groups``: arguments that a user gives the loss."""
    return partial(_with_loss, reduction, biased, groups)


def batch(seed: int) -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 2, 8), generator=g)
    targets[0, :5] = -100  # not spread evenly
    return {"sample": {"tokens": tokens, "targets": targets}}
