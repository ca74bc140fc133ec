"""How long an op takes at a machine's rates, cut or whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from annotations.registry import record_of
from annotations.rules import InnerCost

from ..capture.nodes import arguments_of, example_shape, example_size, tensor_inputs, values_of
from ..rates import Link, Rates, received_seconds

BACKWARD_OF_ATTENTION = 2.5  # times its forward: five products instead of two
BACKWARD = 2.0  # times the forward, for other ops
KEY = "seqshard_flops"  # of a node's meta


def whole_seconds(node: Node, operations: float, rates: Rates) -> float:
    """Seconds of the forward of a whole op that takes this many operations."""
    per_second = rates.matmul_flops_per_second
    if _attends(node):
        per_second = rates.attention_flops_per_second
    tensors = [*(x.meta["val"] for x in tensor_inputs(node)), *values_of(node)]
    touched = sum(value.nbytes for value in tensors if isinstance(value, Tensor))
    return max(touched / rates.memory_bytes_per_second, operations / per_second)


def cut_seconds(
    node: Node, whole: float, cuts: Iterable[tuple[InnerCost, int, Link]], backward: bool
) -> float:
    """Seconds of an op's forward and, if wanted, backward, with what moves inside.

    Args:
        whole: from :func:`whole_seconds`.
        cuts: for each axis what moves inside, how many ranks divide the work, and the link.
    """
    cuts = list(cuts)
    for inner, parts, _ in cuts:
        if parts > 1:
            whole *= inner.imbalance / parts
    seconds = _with_inner(whole, [(x, x.forward_bytes, link) for x, _, link in cuts])
    if not backward:
        return seconds
    whole *= BACKWARD_OF_ATTENTION if _attends(node) else BACKWARD
    return seconds + _with_inner(whole, [(x, x.backward_bytes, link) for x, _, link in cuts])


def _attends(node: Node) -> bool:
    record = record_of(node.target)
    return record is not None and record.rule.flops is not None


def _with_inner(seconds: float, moved: Iterable[tuple[InnerCost, int, Link]]) -> float:
    """Seconds of computing, and of what moves inside, during the computation or before it."""
    for inner, count, link in moved:
        moving = received_seconds(count, link, inner.rounds)
        seconds = max(seconds, moving) if inner.overlaps else seconds + moving
    return seconds


def flops(node: Node) -> float:
    """Floating-point operations of the whole op, forward: of an annotated op as its rule says, of
    others those of the matrix products and convolutions in it, as torch counts them."""
    record = record_of(node.target)
    if record is not None:
        if record.rule.flops is None:
            return 0.0
        arguments = arguments_of(node, record)
        return record.rule.flops(record.bind(arguments), arguments)
    if KEY not in node.meta:
        node.meta[KEY] = float(_counted(node))
    return node.meta[KEY]  # type: ignore[no-any-return]


def _counted(node: Node) -> int:
    """Counted on tensors without data, of the example's sizes."""
    op = node.target
    if not isinstance(op, OpOverload) or (
        op.overloadpacket not in flop_registry and not op._can_decompose()
    ):
        return 0

    def without_data(arg: Node) -> Any:
        return pytree.tree_map(_on_meta, arg.meta.get("val"))

    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), without_data)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            op(*args, **kwargs)
    except Exception:  # it needs values, or a device; whatever it is, a plan is only less exact
        return 0
    return counter.get_total_flops()


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(example_shape(value.shape), dtype=value.dtype, device="meta")
    return example_size(value)
