"""Jobs for the tests of dropout under the embedded engine; see ``ranks.Pool``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_groups import device
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize
from annotations.engines.torch.capture.dropout import MAX_CUT_DIMS
from customized_ops.ring_attention import wrap_ring_attn_func


class Dropping(nn.Module):
    """Attention with dropout in front of it, in a residual branch and on what has five dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(6, 18).double()
        self.out = nn.Linear(6, 6).double()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.drop(self.project(x)).view(*x.shape[:-1], 9, 2).split(3, -2)
        y = wrap_ring_attn_func(q, k, v).flatten(2)
        y = x + self.drop(self.out(y))
        y = self.drop(y.view(*x.shape[:-1], 3, 1, 2))
        return (F.dropout(y, 0.5, self.training) * torch.arange(6.0).view(3, 1, 2).to(x)).sum()


def inputs(seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(3, 9, 6, dtype=torch.float64, generator=g)


def by_batch(ops: Any, config: ComputeConfig) -> dict[str, str]:
    return {op.name: "b" if op.communicates else "d0" for op in ops}


def on_columns(ops: Any, config: ComputeConfig) -> dict[str, str]:
    """Dropouts are cut on the last dim, whose parts do not line up with the generator's words."""
    dropouts = [op for op in ops if op.op == "dropout"]
    return {op.name: op.splits[-1] for op in dropouts} | {"ring_attn": "l"}


def on_two_axes(ops: Any, config: ComputeConfig) -> dict[str, tuple[str, str]]:
    """Tokens along the first axis of a mesh, the batch along the second."""
    return {op.name: ("l", "b") if op.communicates else ("d1", "d0") for op in ops}


def dropped(policy: Any, shape: tuple[int, ...]) -> list[tuple[float, dict[str, Tensor]]]:
    """Two steps; every rank's generator starts elsewhere, the first rank's counts."""
    plan = math.prod(shape)
    config = ComputeConfig(plan, dist.get_world_size(), pas_config={"mesh_shape": shape})
    given = {"x": inputs().to(device())}
    lowered = config.plan_ngpus == 2  # tracing takes longer than all else
    model = parallelize(Dropping().to(device()), given, policy, config, lowered=lowered)
    torch.manual_seed(7 if dist.get_rank() % plan == 0 else dist.get_rank())
    steps = []
    x = inputs().to(device())
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        model.sync_grad()
        steps.append((loss.item(), {n: p.grad.cpu().clone() for n, p in model.named_parameters()}))
    return steps


class OneProcess:
    """In place of ``F.dropout``: the op that the engine runs, on whole tensors."""

    def __init__(self, seed: int, copy: int) -> None:
        self.seed, self.number = torch.tensor([seed, copy]), 0

    def __call__(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        number, self.number = self.number, self.number + 1
        shape, first = list(x.shape), [0] * MAX_CUT_DIMS
        return torch.ops.seqshard.dropout(x, self.seed, p, number, shape, *first)
