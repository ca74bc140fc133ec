"""What a strategy and a move cost, in seconds.

The rates are round numbers for one accelerator and its link, not measurements: with parameters kept
whole, the plans of the shipped policies depend on their order of magnitude only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Placement
from torch.fx import Node
from torch.utils import _pytree as pytree

from annotations.registry import record_of

from .capture import tensor_inputs
from .strategies import Strategy


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank and of its link."""

    flops_per_second: float = 3e14
    memory_bytes_per_second: float = 2e12
    link_bytes_per_second: float = 2e11
    link_seconds: float = 2e-5


def compute_seconds(node: Node, strategy: Strategy, parts: int, rates: Rates) -> float:
    """Forward and backward (twice the forward) of one op."""
    if node.op != "call_function":
        return 0.0
    moved = sum(_bytes(x.meta["val"]) for x in tensor_inputs(node)) + _bytes(node.meta["val"])
    seconds = max(moved / rates.memory_bytes_per_second, _flops(node) / rates.flops_per_second)
    share = strategy.inner.imbalance / parts if strategy.divides else 1.0
    inner = strategy.inner.forward_bytes + strategy.inner.backward_bytes
    return 3 * seconds * share + inner / rates.link_bytes_per_second


def move_bytes(value: Tensor, source: Placement, target: Placement, parts: int) -> tuple[int, int]:
    """Bytes that a rank receives to bring ``value`` from one placement to another: forward, and its
    gradient's in the backward."""
    if source == target:
        return 0, 0
    size = _bytes(value)
    rest = size * (parts - 1) // parts
    gathers = source.is_shard() and target.is_replicate()
    if source.is_partial():
        forward = rest if target.is_shard() else 2 * rest
        back = rest if target.is_shard() else 0
    elif gathers:
        forward, back = rest, rest
    elif source.is_replicate():
        forward, back = 0, (rest if target.is_shard() else 0)
    else:
        forward = back = rest // parts
    return forward, (back if value.is_floating_point() else 0)


def move_seconds(
    value: Tensor, source: Placement, target: Placement, parts: int, rates: Rates
) -> float:
    """Time of :func:`move_bytes`."""
    amounts = move_bytes(value, source, target, parts)
    return sum(n / rates.link_bytes_per_second + (rates.link_seconds if n else 0) for n in amounts)


def _flops(node: Node) -> float:
    record = record_of(node.target)
    if record is not None:
        if record.rule.flops is None:
            return 0.0
        arguments = record.arguments(*_values((node.args, node.kwargs)))
        return record.rule.flops(record.bind(arguments), arguments)
    name = str(node.target)
    if "linear" in name or ".mm" in name or "matmul" in name or "bmm" in name:
        values: Sequence[Tensor] = [x.meta["val"] for x in tensor_inputs(node)]
        return 2.0 * node.meta["val"].numel() * values[0].shape[-1]
    return 0.0


def _values(tree: object) -> tuple[tuple[object, ...], dict[str, object]]:
    is_node = lambda x: isinstance(x, Node)  # noqa: E731
    return pytree.tree_map(lambda x: x.meta["val"] if is_node(x) else x, tree, is_leaf=is_node)


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, tuple | list) else 0
