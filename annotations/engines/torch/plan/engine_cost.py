"""What a strategy and a move cost, in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.tensor import Shard
from torch.fx import Node

from annotations.registry import record_of

from ..capture.nodes import arguments_of, tensor_inputs, values_of
from ..strategies.op_strategies import Strategy
from ..strategies.reshard import ReshardStep, Shape

BACKWARD_OF_ATTENTION = 2.5  # of its forward: five products for two
BACKWARD = 2.0  # of other ops' forward


@dataclass(frozen=True)
class Link:
    """What joins the ranks of one mesh axis: a collective of n received bytes takes ``seconds + n /
    bytes_per_second``."""

    seconds: float = 2e-5
    bytes_per_second: float = 2e11


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank and of its links.

    The defaults are round numbers for one accelerator, not measurements; :mod:`.rates` measures.

    Attributes:
        links: of each axis of the mesh, in order; the last is of all ranks, over which gradients
            are added up. With fewer, the last stands for the rest.
        calibrated: whether they were measured.
    """

    matmul_flops_per_second: float = 3e14
    attention_flops_per_second: float = 3e14
    memory_bytes_per_second: float = 2e12
    links: tuple[Link, ...] = (Link(),)
    calibrated: bool = False

    def link(self, axis: int) -> Link:
        """Of a mesh axis; -1 is all ranks."""
        return self.links[min(axis, len(self.links) - 1)]

    def by_bytes(self) -> Rates:
        """The same without what it takes to start a collective: the fewest bytes are cheapest."""
        links = tuple(Link(0.0, link.bytes_per_second) for link in self.links)
        return replace(self, links=links)


def compute_seconds(
    node: Node, strategy: Strategy, parts: Shape, rates: Rates, differentiated: bool = True
) -> float:
    """Forward and, where wanted, backward of one op, with what it moves inside."""
    if node.op != "call_function" or is_view(node):
        return 0.0
    record = record_of(node.target)
    attends = record is not None and record.rule.flops is not None
    tensors = [*(x.meta["val"] for x in tensor_inputs(node)), *values_of(node)]
    moved = sum(value.nbytes for value in tensors if isinstance(value, Tensor))
    per_second = rates.attention_flops_per_second if attends else rates.matmul_flops_per_second
    forward = max(moved / rates.memory_bytes_per_second, flops(node) / per_second)
    for axis, divided in enumerate(strategy.divided):
        if divided:
            forward *= strategy.inner[axis].imbalance / parts[axis]
    seconds = _with_inner(forward, strategy, "forward_bytes", rates)
    if not differentiated:
        return seconds
    backward = forward * (BACKWARD_OF_ATTENTION if attends else BACKWARD)
    return seconds + _with_inner(backward, strategy, "backward_bytes", rates)


def _with_inner(seconds: float, strategy: Strategy, side: str, rates: Rates) -> float:
    """Computing, and what moves inside beside it or before it."""
    for axis, inner in enumerate(strategy.inner):
        moving = received_seconds(getattr(inner, side), rates.link(axis))
        seconds = max(seconds, moving) if inner.overlaps else seconds + moving
    return seconds


def received_seconds(count: float, link: Link) -> float:
    """Time of a collective in which the busiest rank receives ``count`` bytes."""
    return link.seconds + count / link.bytes_per_second if count else 0.0


def steps_bytes(steps: Sequence[ReshardStep], value: Tensor) -> int:
    """Received by the busiest rank along a path."""
    return sum(int(step.elements * value.element_size()) for step in steps)


def steps_seconds(steps: Sequence[ReshardStep], value: Tensor, rates: Rates) -> float:
    """Time of a path."""
    seconds = 0.0
    for step in steps:
        received, copied = step.elements * value.element_size(), 0.0
        if step.kind in ("all-gather", "reduce-scatter"):
            ends = step.before[step.axis], step.after[step.axis]
            [dim] = {place.dim for place in ends if isinstance(place, Shard)}
            # What arrives is read and written to put it in its place; parts of the first dim are
            # contiguous.
            copied = 2.0 * received if math.prod(value.shape[:dim]) > 1 else 0.0
        moving = received_seconds(received, rates.link(step.axis))
        seconds += moving + copied / rates.memory_bytes_per_second
    return seconds


def flops(node: Node) -> float:
    """Of the whole op, forward."""
    record = record_of(node.target)
    if record is not None:
        if record.rule.flops is None:
            return 0.0
        arguments = arguments_of(node, record)
        return record.rule.flops(record.bind(arguments), arguments)
    name = str(node.target)
    if any(product in name for product in ("linear", ".mm", "matmul", "bmm")):
        return 2.0 * node.meta["val"].numel() * tensor_inputs(node)[0].meta["val"].shape[-1]
    return 0.0


def is_view(node: Node) -> bool:
    """Whether an op returns its argument's memory."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)
