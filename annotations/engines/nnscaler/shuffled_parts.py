"""Which parts have their tokens in the order of a shuffle that the model calls itself.

That is found in the graph of whole ops, see :mod:`..shuffled_tokens`, and noted on the parts of a
graph that is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import nnscaler.policies
from nnscaler.ir.cten import IRTensor

from annotations.errors import PartitionError
from annotations.rules import PartitionRule

from ..shuffled_tokens import Call, TokenDims, TokenOrder, TokenOrders, order_error
from . import placement
from .graph_values import on_meta, restored, traced
from .op_node import OpNode

_COPIES = ("clone", "to", "detach", "contiguous", "int", "long")  # of the same integers
# Of a tensor, whatever order its tokens are in; where they return no tensor.
_OF_SHAPES = ("size", "len", "dim", "ndimension", "numel", "getattr")
_SHUFFLES = "wrap_maybe_shuffle", "wrap_maybe_unshuffle"
_THEIRS = (
    "it is nnscaler's own, whose order the attention of this package does not see",
    "from customized_ops.ring_attention import wrap_maybe_shuffle, wrap_maybe_unshuffle",
)


class ShuffledGraph:
    """What a graph of whole ops has in another order than natural.

    Attributes:
        shuffles, takers: the ops that make, take or restore an order, and those whose arguments
            must name it, by first result. orders: what these must name.
        problem: the first op that cannot take its operands' order; an error only where the
            shuffles are cut.
    """

    def __init__(self, graph: Any) -> None:
        self.shuffles: dict[Any, Any] = {}
        self.takers: dict[Any, Any] = {}
        self.orders: dict[Any, str] = {}
        self.problem: PartitionError | None = None
        self.copied: dict[Any, Any] = {}  # from a copy of integers to what it was made from
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
            following.returned(tensor.parent for tensor in _tensors_in(graph.outputs()))
        except PartitionError as error:
            self.problem = error
        for call in calls:  # also those behind the problem
            if call.shuffle is not None:
                self.shuffles[call.outputs[0]] = call.node

    def mark(self, graph: Any) -> None:
        """Mark the parts whose calls must name the order of their tokens.

        Args:
            graph: the same, cut.
        Raises:
            PartitionError: some shuffles are cut, others not; or an op cannot take its operands'
                order.
        """
        if not self.shuffles:
            return
        groups: dict[Any, frozenset[tuple[int, ...]]] = {}  # by first result, who share its tokens
        parts = graph.select(ntype=OpNode)
        for part in parts:
            rule = part.rule
            cut = [site for site in part.sites() if site.group or site.identifier in rule.orders]
            ranks = {placement.devices(part, site, part.placed) for site in cut}
            whole = part.outputs()[0].parent
            groups[whole] = groups.get(whole, frozenset()) | ranks
        if self._are_cut(groups):
            for part in parts:
                part.order = self.orders.get(part.outputs()[0].parent)

    def _are_cut(self, groups: Mapping[Any, frozenset[tuple[int, ...]]]) -> bool:
        """Whether the shuffles are cut, so that attention must name their order."""
        shuffled = {groups[whole] for whole in self.shuffles}
        if not any(shuffled):
            return False
        if self.problem is not None:
            raise self.problem
        for whole, node in {**self.shuffles, **self.takers}.items():
            if groups[whole] not in shuffled or len(shuffled) > 1:
                shown = [list(map(list, sorted(g))) or "nowhere" for g in shuffled]
                raise order_error(
                    _title(node),
                    f"tokens are shuffled over the ranks {' and '.join(map(str, shown))}, and it "
                    f"is cut on them over {list(map(list, sorted(groups[whole]))) or 'none'}",
                    "every shuffle, and all attention in its order, cut on 'l' over the same ranks",
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
        self.inputs = [tensor.parent for tensor in tensors]
        self.outputs = [tensor.parent for tensor in node.outputs() if isinstance(tensor, IRTensor)]
        if node.name in _COPIES and len(tensors) == 1 and self.outputs:
            [whole] = self.inputs
            graph.copied[self.outputs[0]] = graph.copied.get(whole, whole)

    def dim_of(self, identifier: str) -> int | None:
        return _dim(self.node.anno.inputs()[0], identifier)

    def along(self, slot: int, dim: int) -> TokenDims | None:
        node, rule = self.node, self.rule
        if getattr(node, "anno", None) is None:
            return None
        read = _of_tensors(node.anno.inputs(), node.inputs())
        made = _of_tensors(node.anno.outputs(), node.outputs())
        if read[slot].ignore:
            return None
        name = placement.leading(read[slot].dims[dim])
        dims = [d for shape in (*read, *made) if not shape.ignore for d in shape.dims]
        own = [[x for x in d.identifiers if x != "1"] for d in dims if name in d.identifiers]
        if name == "1" or any(each != [name] for each in own):
            return None
        takes = rule is not None and bool(rule.orders)
        if not (name in rule.orders if rule is not None and takes else self._is_free(name)):
            return None
        inputs, outputs = ([_dim(shape, name) for shape in side] for side in (read, made))
        return TokenDims(inputs, outputs, name if takes else "")

    def _is_free(self, name: str) -> bool:
        if self.rule is not None and name in {**self.rule.communicates, **self.rule.told}:
            return False
        read, cuts = self.node.anno.inputs(), self.node.transform_space()
        return any(placement.leading(read[n].dims[dim]) == name for n, dim in cuts)

    def origin(self, name: str) -> Any:
        value = self.arguments.get(name)
        return self._graph.copied.get(value, value) if isinstance(value, IRTensor) else value

    def take(self, order: TokenOrder, arguments: Mapping[str, Any]) -> None:
        self._graph.takers[self.outputs[0]] = self.node
        self._graph.orders[self.outputs[0]] = order.order


def _rule_and_arguments(node: OpNode) -> tuple[PartitionRule, dict[str, Any]]:
    """Of the op: its arguments by name as the call has them, tensors by the whole ones."""
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


def _of_tensors(shapes: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The annotation of each tensor."""
    pairs = zip(shapes, values, strict=True)
    return [shape for shape, value in pairs if isinstance(value, IRTensor)]


def _tensors_in(value: Any) -> Iterator[Any]:
    """Those of results, in whatever containers."""
    if isinstance(value, IRTensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, Sequence | set) and not isinstance(value, str):
        for each in value:
            yield from _tensors_in(each)
    elif hasattr(value, "value") and value.value is not value:  # a constant, or what holds one
        yield from _tensors_in(value.value)


def _dim(shape: Any, name: str) -> int | None:
    if shape.ignore:
        return None
    dims = enumerate(shape.dims)
    return next((n for n, dim in dims if placement.leading(dim) == name), None)


def _title(node: Any) -> str:
    return f"{node.name} in {getattr(node, 'fqn', '') or 'the module'}"
