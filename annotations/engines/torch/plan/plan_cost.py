"""What a plan of a graph costs: seconds, and bytes that a rank receives and must keep.

What a rank keeps between forward and backward is an estimate. Parameters, their gradients and the
optimizer's state are counted exactly, in the dtype that the parameters are kept in. Those that are
computed with in another are cast at the start of a forward, and what was cast is counted as held
until its backward is over. Of activations, what an op reads is kept where its backward needs it,
each tensor once for each of its placements. What an op receives, it holds only while it runs; that
of the op that receives most is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from ..capture.nodes import tensor_inputs, value_of
from ..strategies.choices import Choices, Reading, move_steps
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places, local_bytes, local_shape
from .engine_cost import Rates, compute_seconds, is_view, steps_bytes, steps_seconds

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


@dataclass(frozen=True, eq=False)
class PlanCost:
    """What strategies of a graph's ops cost at these rates."""

    choices: Choices
    rates: Rates
    budget: Budget

    def op_seconds(self, node: Node, strategy: Strategy) -> float:
        """Of an op, forward and where wanted backward."""
        differentiated = self.choices.differentiated[node]
        return compute_seconds(node, strategy, self.choices.parts, self.rates, differentiated)

    def move(
        self, producer: Node, index: int, source: Places, reading: Reading
    ) -> tuple[int, int, float]:
        """Bytes received to bring a tensor to a reader, and its gradient back; seconds of both."""
        value = value_of(producer, index)
        paths = move_steps(self.choices, producer, value, source, reading)
        there, back = (steps_bytes(path, value) for path in paths)
        return there, back, sum(steps_seconds(path, value, self.rates) for path in paths)

    def sync_bytes(self, node: Node, strategy: Strategy) -> int:
        """Received to add up a parameter's gradient after the backward: of a whole one over all
        ranks, of others over the copies."""
        choices = self.choices
        if not choices.differentiated[node]:
            return 0
        kept = local_bytes(choices.stored[node], strategy.outputs[0], choices.parts)
        ranks = choices.copies * (1 if any(strategy.divided) else prod(choices.parts))
        return 2 * kept * (ranks - 1) // ranks  # by the ring algorithm

    def sync_seconds(self, count: int) -> float:
        """Many gradients travel together, so that each pays nothing to start."""
        return count / self.rates.link(-1).bytes_per_second

    def parameter_bytes(self, node: Node, strategy: Strategy) -> tuple[int, int, int, int]:
        """Of a parameter, its gradient and the optimizer's state, as it is kept; and of its cast to
        the graph's dtype."""
        stored, read, parts = self.choices.stored[node], node.meta["val"], self.choices.parts
        places = strategy.outputs[0]
        kept = local_bytes(stored, places, parts)
        cast = local_bytes(read, places, parts) if read.dtype != stored.dtype else 0
        if not stored.requires_grad:
            return kept, 0, 0, cast
        elements = prod(local_shape(stored.shape, places, parts))
        return kept, kept, int(elements * self.budget.optimizer_bytes), cast

    def keeps(self, node: Node) -> bool:
        """Whether the backward of an op needs what it reads."""
        if node.op != "call_function" or not self.choices.differentiated[node] or is_view(node):
            return False
        if node.target in LINEAR:
            return False
        return node.target not in PRODUCTS or len(tensor_inputs(node)) > 1


def received_bytes(strategy: Strategy) -> int:
    """What an op receives inside, forward, and holds only while it runs."""
    return sum(inner.forward_bytes for inner in strategy.inner)
