"""The shuffles that a model calls itself: followed to its attention, or taken out of its graph.

If attention is cut along one axis of the mesh, every shuffle is cut with it, and attention is given
the order of its tokens (:mod:`~annotations.engines.shuffled_tokens`). If not, the shuffles go: in a
single-device program they are the identity.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import Node

from annotations.binding import BoundAnnotation
from annotations.registry import record_of

from ...shuffled_tokens import MIXES, UNKNOWN, Call, TokenDims, TokenOrder, TokenOrders
from ..capture.capture import Captured
from ..capture.nodes import (
    is_getitem,
    module_of,
    origin,
    resolve,
    same_integers,
    tensor_inputs,
    values_of,
)
from ..strategies.aten import bound_of
from .permuted_graph import set_arguments
from .token_axes import SequenceDim, along, along_dim, is_known

_SEQUENCES = ("l", "lq")  # what annotated ops call sequences of tokens


def shuffles(captured: Captured) -> list[Node]:
    """The ops of a graph that put tokens in another order, or back, or work in one."""
    return [node for node in captured.graph.nodes if _NodeCall(node).shuffle is not None]


def without_shuffles(captured: Captured) -> Captured:
    """The same single-device program with no shuffle."""
    graph = copy.deepcopy(captured.graph)
    found = replace(captured, graph=graph)
    for node in shuffles(found):
        call = _NodeCall(node)
        assert call.shuffle is not None
        before, after = call.shuffle.orders(call.arguments)
        if before == after:  # it does something else, in that order
            set_arguments(node, call.shuffle.natural)
        else:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    graph.lint()
    return found


def axis_of_shuffles(captured: Captured, splits: Mapping[str, Any]) -> int | None:
    """The axis of the mesh along which all ops that take an order are cut on their sequence, or all
    shuffles if there are no such ops; None if there is no such axis.

    Args:
        splits: op name to what it is split on, on a mesh of several axes a tuple of that.
    """
    taking = {node.name for node in captured.graph.nodes if _NodeCall(node).takes_an_order}
    taking = taking or {node.name for node in shuffles(captured)}
    axes = set()
    for name in taking:
        split = splits.get(name)
        each = split if isinstance(split, tuple) else (split,)
        cut = [axis for axis, identifier in enumerate(each) if identifier in _SEQUENCES]
        axes.add(cut[0] if len(cut) == 1 else None)
    return axes.pop() if len(axes) == 1 else None


def ordered(captured: Captured) -> Captured:
    """``captured`` with cut shuffles: attention is given the order of its tokens.

    Raises:
        PartitionError: an op gets tokens in an order that it cannot take, or a result of the module
            has them in it; names the op, the order, and what would be accepted.
    """
    graph = copy.deepcopy(captured.graph)
    orders = TokenOrders(functools.partial(same_integers, constants=captured.constants))
    for node in list(graph.nodes):
        if node.op == "output":
            orders.returned(_NodeCall(node).inputs)
        elif not is_getitem(node):
            orders.visit(_NodeCall(node))
    graph.lint()
    return replace(captured, graph=graph)


class _NodeCall(Call):
    """A node. A tensor's tokens are given by their :class:`.SequenceDim` and their number."""

    def __init__(self, node: Node) -> None:
        record = record_of(node.target)
        self.node = node
        op = node.target if record is None else record.title
        self.title = f"{node.name} ({op} in {module_of(node) or 'the module'})"
        self.rule = None if record is None else record.rule
        self.arguments = {} if record is None else record.arguments(node.args, node.kwargs)
        self.inputs = [_tensor(*resolve(x)) for x in tensor_inputs(node)]
        self.outputs = [_tensor(node, index) for index in range(len(values_of(node)))]

    @property
    def takes_an_order(self) -> bool:
        """Whether its arguments must name the order of its tokens."""
        return self.rule is not None and bool(self.rule.orders)

    def dim_of(self, identifier: str) -> tuple[SequenceDim, int] | None:
        bound = bound_of(self.node)
        assert bound is not None
        if identifier not in _splits(bound):
            return None
        [dim] = (x for x in along_dim(self.node, bound, identifier).inputs if x is not None)
        return dim, bound.sizes[identifier]

    def along(self, slot: int, dim: tuple[SequenceDim, int]) -> TokenDims | str:
        here, length = dim
        identifier = ""
        if self.takes_an_order:
            bound = bound_of(self.node)
            assert bound is not None and self.rule is not None
            known = _splits(bound) & self.rule.orders.keys()
            identifier = next((name for name in _SEQUENCES if name in known), "")
            way = along_dim(self.node, bound, identifier) if identifier else None
        else:
            way = along(self.node, here, length, slot=slot)
        if way is None or way.inputs[slot] != here:
            return MIXES if is_known(self.node) else UNKNOWN
        sources = zip(way.inputs, tensor_inputs(self.node), strict=True)
        inputs = [None if each is None or _is_uniform(x) else (each, length) for each, x in sources]
        outputs = [None if each is None else (each, length) for each in way.outputs]
        return TokenDims(inputs, outputs, identifier)

    def origin(self, name: str) -> Node:
        return origin(self.arguments[name])

    def take(self, order: TokenOrder, arguments: Mapping[str, Any]) -> None:
        set_arguments(self.node, arguments)


def _tensor(node: Node, index: int) -> str:
    """A name of one of an op's results."""
    return f"{node.name}[{index}]" if index else node.name


def _splits(bound: BoundAnnotation) -> set[str]:
    return {split.identifier for split in bound.splits()}


def _is_uniform(node: Node) -> bool:
    """Whether a tensor is the same at every token: made of one number."""
    bound = None if record_of(node.target) else bound_of(node)
    return bound is not None and not bound.annotation.inputs
