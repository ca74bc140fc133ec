"""What a plan of a graph costs: seconds, and bytes that a rank receives and must keep.

What a rank keeps between forward and backward is an estimate. Parameters, their gradients and the
optimizer's state are counted exactly, in the dtype that the parameters are kept in. Parameters that
are computed with in another dtype are cast at the start of a forward, and the casts are counted as
held until its backward is over. An activation that an op reads is kept if the op's backward needs
it, once for each of its placements. An op holds what it receives only while it runs; the most that
any one op receives is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.fx import Node

from ..capture.nodes import tensor_inputs, values_of
from ..rates import Rates, received_seconds
from ..strategies.choices import Choices, Reading
from ..strategies.op_seconds import cut_seconds, flops, whole_seconds
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements, gradient_of, local_bytes, local_shape
from ..strategies.reshard import ReshardStep, steps

ADAM_BYTES = 8.0  # two fp32 copies

_aten = torch.ops.aten
LINEAR = {  # ops whose gradients need no input
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.neg.default, _aten._to_copy.default),
    *(_aten.cat.default, _aten.clone.default, _aten.sum.default, _aten.sum.dim_IntList),
    *(_aten.mean.default, _aten.mean.dim),
}
PRODUCTS = {_aten.mul.Tensor, _aten.div.Tensor}  # whose gradients need the other input


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may hold, None for no limit; and bytes of the optimizer's state for each
    element of a parameter."""

    limit_bytes: float | None = None
    optimizer_bytes: float = ADAM_BYTES


@dataclass(frozen=True, eq=False)
class PlanCost:
    """What strategies of a graph's ops cost at these rates."""

    choices: Choices
    rates: Rates
    budget: Budget

    def op_seconds(self, node: Node, strategy: Strategy) -> float:
        """Seconds of an op's forward and, where wanted, backward, with what it moves inside."""
        if node.op != "call_function" or is_view(node):
            return 0.0
        over = zip(strategy.divided, strategy.inner, self.choices.parts, strict=True)
        cuts = [
            (inner, parts if divided else 1, self.rates.link(axis))
            for axis, (divided, inner, parts) in enumerate(over)
        ]
        whole = whole_seconds(node, flops(node), self.rates)
        return cut_seconds(node, whole, cuts, self.choices.differentiated[node])

    def move(
        self, producer: Node, index: int, source: Placements, reading: Reading
    ) -> tuple[int, int, float]:
        """Bytes received to bring a tensor to a reader, and its gradient back; seconds of both."""
        choices, value, (target, grad) = self.choices, values_of(producer)[index], reading
        shape, size = tuple(value.shape), value.element_size()
        there = steps(shape, source, target, choices.parts)
        back: tuple[ReshardStep, ...] = ()
        # Each rank keeps its part of the gradient of a parameter that is whole.
        stays = producer in choices.parameters and all(p.is_replicate() for p in source)
        if choices.differentiated[producer] and not stays:
            back = steps(shape, grad, gradient_of(source), choices.parts)
        received = [sum(int(step.elements * size) for step in path) for path in (there, back)]
        seconds = [sum(self._step_seconds(step, value) for step in path) for path in (there, back)]
        return received[0], received[1], sum(seconds)

    def _step_seconds(self, step: ReshardStep, value: Tensor) -> float:
        received, copied = step.elements * value.element_size(), 0.0
        if step.kind in ("all-gather", "reduce-scatter"):
            ends = step.before[step.axis], step.after[step.axis]
            [dim] = {place.dim for place in ends if isinstance(place, Shard)}
            # What arrives is read and written once to put it in its place, except for parts of the
            # first dim: these are contiguous.
            copied = 2.0 * received if prod(value.shape[:dim]) > 1 else 0.0
        moving = received_seconds(received, self.rates.link(step.axis))
        return moving + copied / self.rates.memory_bytes_per_second

    def sync_bytes(self, node: Node, strategy: Strategy) -> int:
        """Bytes received to sum a parameter's gradient after the backward: over all ranks if the
        parameter is whole, else over the copies."""
        choices = self.choices
        if not choices.differentiated[node]:
            return 0
        kept = local_bytes(choices.kept[node], strategy.outputs[0], choices.parts)
        ranks = choices.copies * (1 if any(strategy.divided) else prod(choices.parts))
        return 2 * kept * (ranks - 1) // ranks  # by the ring algorithm

    def sync_seconds(self, count: int) -> float:
        """Seconds to receive ``count`` bytes of gradients. Many travel together, so that each pays
        nothing to start."""
        return count / self.rates.link(-1).bytes_per_second

    def parameter_bytes(self, node: Node, strategy: Strategy) -> tuple[int, int, int, int]:
        """Bytes of a parameter as it is kept, of its gradient and the optimizer's state, and of its
        cast to the graph's dtype."""
        kept, read, parts = self.choices.kept[node], node.meta["val"], self.choices.parts
        placements = strategy.outputs[0]
        held = local_bytes(kept, placements, parts)
        cast = local_bytes(read, placements, parts) if read.dtype != kept.dtype else 0
        if not kept.requires_grad:
            return held, 0, 0, cast
        elements = prod(local_shape(kept.shape, placements, parts))
        return held, held, int(elements * self.budget.optimizer_bytes), cast

    def keeps(self, node: Node) -> bool:
        """Whether the backward of an op needs what it reads."""
        if node.op != "call_function" or not self.choices.differentiated[node] or is_view(node):
            return False
        if node.target in LINEAR:
            return False
        return node.target not in PRODUCTS or len(tensor_inputs(node)) > 1


def received_bytes(strategy: Strategy) -> int:
    """Bytes that an op receives inside its forward, and holds only while it runs."""
    return sum(inner.forward_bytes for inner in strategy.inner)


def is_view(node: Node) -> bool:
    """Whether an op returns its argument's memory."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)
