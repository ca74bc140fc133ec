"""What a rank must keep between forward and backward, in bytes: an estimate.

Parameters, their gradients and the optimizer's state are counted exactly, in the dtype that the
parameters are kept in. Those that are computed with in another are cast at the start of a forward,
and what was cast is counted as held until its backward is over. Of activations, what an op reads is
kept where its backward needs it, each tensor once for each of its placements. What an op
receives, it holds only while it runs; that of the op that receives most is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..capture.nodes import tensor_inputs
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places, local_bytes, local_shape
from ..strategies.reshard import Shape
from .engine_cost import is_view

ADAM_BYTES = 8.0  # two fp32 copies

_aten = torch.ops.aten
# Their gradients need no input.
LINEAR = {
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.neg.default,
    _aten._to_copy.default,
    _aten.cat.default,
    _aten.clone.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.default,
    _aten.mean.dim,
}
# Theirs need the other input.
PRODUCTS = {_aten.mul.Tensor, _aten.div.Tensor}


@dataclass(frozen=True)
class Budget:
    """What a rank may hold.

    Attributes:
        limit_bytes: None for no limit.
        optimizer_bytes: the optimizer's state for each element of a parameter.
    """

    limit_bytes: float | None = None
    optimizer_bytes: float = ADAM_BYTES


@dataclass(frozen=True)
class Held:
    """Bytes of a rank; ``casts`` are those of parameters, to the dtype that is computed in."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    passing: int
    casts: int = 0

    @property
    def total(self) -> int:
        """All together."""
        of_parameters = self.parameters + self.gradients + self.optimizer + self.casts
        return of_parameters + self.activations + self.passing


def keeps(node: Node, differentiated: Mapping[Node, bool]) -> bool:
    """Whether the backward of an op needs what it reads."""
    if node.op != "call_function" or not differentiated.get(node) or is_view(node):
        return False
    if node.target in LINEAR:
        return False
    return node.target not in PRODUCTS or len(tensor_inputs(node)) > 1


def parameter_bytes(
    stored: Tensor, read: Tensor, places: Places, parts: Shape, budget: Budget
) -> tuple[int, ...]:
    """Of a parameter, its gradient and the optimizer's state, as it is kept; and of its cast.

    Args:
        stored, read: the parameter in the dtype that it is kept in, and in that of the graph.
    """
    kept = local_bytes(stored, places, parts)
    cast = local_bytes(read, places, parts) if read.dtype != stored.dtype else 0
    if not stored.requires_grad:
        return kept, 0, 0, cast
    elements = math.prod(local_shape(stored.shape, places, parts))
    return kept, kept, int(elements * budget.optimizer_bytes), cast


def passing_bytes(strategy: Strategy) -> int:
    """What an op holds only while it runs: what it receives."""
    return sum(inner.forward_bytes for inner in strategy.inner)


def held(
    stored: Sequence[tuple[Tensor, Tensor, Places]],
    kept: Sequence[tuple[Any, Places]],
    passing: int,
    parts: Shape,
    budget: Budget,
) -> Held:
    """Of parameters, as they are kept and read, and activations, each with its placements."""
    each = [parameter_bytes(*of, parts, budget) for of in stored]
    sums = [sum(column) for column in zip(*each, strict=True)] if each else [0, 0, 0, 0]
    activations = sum(local_bytes(value, places, parts) for value, places in kept)
    return Held(sums[0], sums[1], sums[2], activations, passing, sums[3])
