"""Finds the parts that have their tokens in the order of a shuffle that the model calls itself.

The order is found in the graph of whole ops, see :mod:`..shuffled_tokens`, and noted on the parts
of the graph that is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

import nnscaler.policies
from nnscaler.ir.cten import IRTensor

from annotations.errors import PartitionError
from annotations.rules import PartitionRule

from ..shuffled_tokens import Call, TokenDims, TokenOrder, TokenOrders, order_error
from . import placement
from .graph_values import on_meta, restored, tensors_in, traced
from .op_node import OpNode
from .token_shapes import token_shapes

_COPIES = ("clone", "to", "detach", "contiguous", "int", "long")  # of the same integers
# These give the same for a tensor in whatever order its tokens are, if they return no tensor.
_OF_SHAPES = ("size", "len", "dim", "ndimension", "numel", "getattr")
_SHUFFLES = "wrap_maybe_shuffle", "wrap_maybe_unshuffle"
_THEIRS = (
    "it is nnscaler's own, whose order the attention of this package does not see",
    "from customized_ops.ring_attention import wrap_maybe_shuffle, wrap_maybe_unshuffle",
)


class ShuffledGraph:
    """What is in another order than natural in a graph of whole ops.

    Attributes:
        shuffles, takers: the ops that make, take or restore an order, and those whose arguments
            must name it, by first result. orders: what the latter must name.
        problem: the first op that cannot take its operands' order; an error only where the
            shuffles are cut.
    """

    def __init__(self, graph: Any) -> None:
        self.shuffles: dict[Any, Any] = {}
        self.takers: dict[Any, Any] = {}
        self.orders: dict[Any, str] = {}
        self.problem: PartitionError | None = None
        self.copied: dict[Any, Any] = {}  # from a copy of integers to what it was copied from
        self.items: dict[Any, Any] = {}  # by container and key, the first
        nodes = nnscaler.policies.get_pas_ops(graph)
        ours = [isinstance(node, OpNode) for node in nodes]
        for node, own in zip(nodes, ours, strict=True):
            if node.name in _SHUFFLES and not own and any(ours):
                raise order_error(_title(node), *_THEIRS)
        calls = [_TracedCall(node, self) for node in nodes]
        following = TokenOrders(operator.eq)
        try:
            for call in calls:
                if call.outputs or call.node.name not in _OF_SHAPES:
                    following.visit(call)
            following.returned(tensor.parent for tensor in tensors_in(graph.outputs()))
        except PartitionError as error:
            self.problem = error
        for call in calls:  # also those after the problem
            if call.shuffle is not None:
                self.shuffles[call.outputs[0]] = call.node

    def note_copy(self, node: Any, read: Sequence[Any], made: Any) -> None:
        """Note what an op's result is a copy of: the same integers, or the same item."""
        if node.name in _COPIES and len(read) == 1:
            self.copied[made] = self.copied.get(read[0], read[0])
        elif node.signature == "_operator.getitem" and isinstance(node.input(1), str | int):
            self.copied[made] = self.items.setdefault(node.inputs(), made)

    def mark(self, graph: Any) -> None:
        """Mark the parts whose calls must name the order of their tokens.

        Args:
            graph: the same graph, cut.
        Raises:
            PartitionError: some shuffles are cut, others not; or an op cannot take its operands'
                order.
        """
        if not self.shuffles:
            return
        cut: dict[Any, set[int]] = {}  # by first result, into how many parts tokens are cut
        parts = graph.select(ntype=OpNode)
        for part in parts:
            orders = part.rule.orders
            sites = [site for site in part.sites() if site.group or site.identifier in orders]
            numbers = {site.parts for site in sites} or {1}
            cut.setdefault(part.outputs()[0].parent, set()).update(numbers)
        if self._are_cut(cut):
            for part in parts:
                part.order = self.orders.get(part.outputs()[0].parent)

    def _are_cut(self, cut: Mapping[Any, set[int]]) -> bool:
        """Whether the shuffles are cut, so that attention must name their order. The order depends
        on the number of parts, not on the ranks that have them."""
        shuffled = set().union(*(cut[whole] for whole in self.shuffles))
        if shuffled == {1}:
            return False
        if self.problem is not None:
            raise self.problem
        for whole, node in {**self.shuffles, **self.takers}.items():
            if cut[whole] != shuffled or len(shuffled) > 1:
                raise order_error(
                    _title(node),
                    f"tokens are shuffled in {_listed(shuffled)} parts, and it is cut on them into "
                    f"{_listed(cut[whole])}",
                    "every shuffle, and all attention in its order, cut on 'l' into as many parts",
                )
        return True


class _TracedCall(Call):
    """A node of nnscaler's; its tensors are the whole ones."""

    def __init__(self, node: Any, graph: ShuffledGraph) -> None:
        self.node, self.title, self._graph = node, _title(node), graph
        self.rule, self.arguments = None, {}
        if isinstance(node, OpNode):
            self.rule, self.arguments = _rule_and_arguments(node)
        tensors = [tensor for tensor in node.inputs() if isinstance(tensor, IRTensor)]
        rest = [x for x in node.inputs() if not isinstance(x, IRTensor)]
        self.inputs = [x.parent for x in (*tensors, *tensors_in([rest, node.kwargs]))]
        self.outputs = [tensor.parent for tensor in node.outputs() if isinstance(tensor, IRTensor)]
        if self.outputs:
            graph.note_copy(node, self.inputs, self.outputs[0])

    def dim_of(self, identifier: str) -> int | None:
        return _dim(self.node.anno.inputs()[0], identifier)

    def along(self, slot: int, dim: int) -> TokenDims | str:
        shapes = token_shapes(self.node, self.rule)
        if isinstance(shapes, str):
            return shapes
        if slot >= len(shapes.read):
            return "nnscaler does not show how it goes along tensors in a list or by keyword"
        taken = frozenset() if self.rule is None else frozenset(self.rule.orders)
        name, why_not = shapes.along(slot, dim, taken)
        if why_not:
            return why_not
        inputs = [_dim(shape, name) for shape in shapes.read]
        inputs += [None] * (len(self.inputs) - len(inputs))
        shown = {n for n, shape in enumerate(shapes.read) if not shape.ignore}
        tokens = self.inputs[slot].shape[dim]
        for n, tensor in enumerate(self.inputs):
            if self.rule is None and n not in shown and _may_have(tensor.shape, tokens):
                return f"nnscaler does not show how it goes along {tensor.name}, which is as long"
        return TokenDims(
            inputs, [_dim(shape, name) for shape in shapes.made], name if taken else ""
        )

    def origin(self, name: str) -> Any:
        value = self.arguments.get(name)
        return self._graph.copied.get(value, value) if isinstance(value, IRTensor) else value

    def take(self, order: TokenOrder, arguments: Mapping[str, Any]) -> None:
        self._graph.takers[self.outputs[0]] = self.node
        self._graph.orders[self.outputs[0]] = order.order


def _rule_and_arguments(node: OpNode) -> tuple[PartitionRule, dict[str, Any]]:
    """The op's rule, and its arguments by name as the call has them, with whole tensors."""
    given = node.arguments()
    record, arguments = node.call.op(on_meta({n: restored(v) for n, v in given.items()}))
    found = dict(arguments)
    if "cu_seqlens" in given:  # one argument for q and k
        given = {"cu_seqlens_k": given["cu_seqlens"], **given}
    for name, value in given.items():
        if value is not None:
            own = value.parent if isinstance(value, IRTensor) else restored(traced(value))
            found[node.call.names.get(name, name)] = own
    return record.rule, found


def _may_have(shape: Sequence[int], tokens: int) -> bool:
    """Whether a tensor may have this many tokens: in one dim, which may hold others too, or in
    several dims."""
    ends = range(len(shape) + 1)
    several = (prod(shape[a:b]) == tokens for a, b in combinations(ends, 2))
    return any(size % tokens == 0 for size in shape) or any(several)


def _dim(shape: Any, name: str) -> int | None:
    if shape.ignore:
        return None
    dims = enumerate(shape.dims)
    return next((n for n, dim in dims if placement.leading(dim) == name), None)


def _title(node: Any) -> str:
    return f"{node.name} in {getattr(node, 'fqn', '') or 'the module'}"


def _listed(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))
