"""An engine as CONTRIBUTING's recipe says to write one: ops run in pieces, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from recipe_op import project
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from annotations import ComputeConfig, record_of


class InPieces(TorchDispatchMode):
    """What the recipe's engine does: an op cut on what its annotation allows, a part at a time."""

    def __init__(self, parts: int, cut: str) -> None:
        super().__init__()
        self.parts, self.cut, self.done = parts, cut, 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        record = record_of(op)
        if record is None:
            return op(*args, **(kwargs or {}))
        arguments = record.arguments(args, kwargs or {})
        split = record.bind(arguments).split(self.cut)
        self.done += 1
        pieces = [
            value.chunk(self.parts, dim) if isinstance(dim, int) else [value] * self.parts
            for value, dim in zip(arguments.values(), split.inputs, strict=True)
        ]
        results = [op(*piece) for piece in zip(*pieces, strict=True)]
        (out,) = split.outputs
        return torch.cat(results, out) if isinstance(out, int) else sum(results)


class Pieces(nn.Module):
    """A module whose ops run in pieces."""

    def __init__(self, module: nn.Module, config: ComputeConfig, cut: str) -> None:
        super().__init__()
        self.module, self.mode = module, InPieces(config.plan_ngpus, cut)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.module(*args, **kwargs)


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight).square().sum()


def parallelize(
    module: nn.Module, examples: Mapping[str, Any], policy: str, config: ComputeConfig
) -> nn.Module:
    """``policy`` is what each op is cut on."""
    return Pieces(module, config, policy)


def as_config(config: ComputeConfig) -> ComputeConfig:
    """Its own is the usual one."""
    return config
