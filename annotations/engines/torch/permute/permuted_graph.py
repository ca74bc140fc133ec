"""Rewrites a captured graph so that some ops run on a sequence in another order.

tokens -- embedding -- attention -- linear -- logits
tokens -- index_select -- embedding -- attention -- linear -- index_select -- logits
            (order)                   (named)                   (back)

Between layers, where ranks hold parts of the tokens, an op of the order's own moves them there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from annotations.registry import record_of
from annotations.rules import LateOrder, Order

from ..capture.capture import Captured
from ..capture.nodes import call, is_getitem, resolve, tensor_inputs, with_inputs
from ..capture.open_sizes import NotOpen
from .token_axes import Along, SequenceDim


@dataclass(frozen=True, eq=False)
class SequencePermutation:
    """Which ops run on the sequence in another order.

    Attributes:
        order: which token is at each position; made in the graph, if it depends on a batch.
        ways: by name, how each of these ops goes along the sequence.
        arguments: by name, for ops whose arguments must name the order, these arguments.
    """

    order: Order | LateOrder
    ways: Mapping[str, Along]
    arguments: Mapping[str, Mapping[str, Any]]

    @property
    def of_any_length(self) -> bool:
        """Whether a batch determines the order, and no dim holds the sequence and other sizes."""
        dims = [dim for way in self.ways.values() for dim in (*way.inputs, *way.outputs) if dim]
        alone = all(dim.outer == dim.inner == 1 for dim in dims)
        return isinstance(self.order, LateOrder) and alone


def moves_parts(order: Order | LateOrder, value: Node, at: SequenceDim) -> bool:
    """Whether a tensor is put in the order, or back, by the order's own op, which moves the tokens
    that a rank lacks. Activations are; what a module is given is whole on every rank."""
    alone, tensor = at.outer == at.inner == 1, value.meta["val"]
    inside = resolve(value)[0].op != "placeholder"
    return order.move is not None and inside and alone and tensor.is_floating_point()


def permuted(captured: Captured, permutation: SequencePermutation) -> Captured:
    """``captured`` with ops in another order, still a function of tensors in natural order."""
    graph = copy.deepcopy(captured.graph)
    rewriting = _Rewriting(graph, permutation)
    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and not is_getitem(node):
            rewriting.feed(node)
    for name, arguments in permutation.arguments.items():
        set_arguments(rewriting.nodes[name], arguments)
    graph.lint()
    return replace(captured, graph=graph, constants={**captured.constants, **rewriting.constants})


def set_arguments(node: Node, others: Mapping[str, Any]) -> None:
    """Give a call of an annotated op other arguments, by name."""
    record = record_of(node.target)
    assert record is not None
    arguments = record.arguments(node.args, node.kwargs)
    assert others.keys() <= arguments.keys()
    node.args, node.kwargs = tuple({**arguments, **others}.values()), {}


class _Rewriting:
    """A graph as it is rewritten. A tensor is brought into an order once, for all its readers.

    Attributes:
        nodes: by name, the nodes that were there before.
        constants: by the placeholder's name, the permutations that were added.
    """

    def __init__(self, graph: Graph, permutation: SequencePermutation) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        self.constants: dict[str, Tensor] = {}
        self._graph, self._permutation = graph, permutation
        self._permuted: dict[tuple[Node, SequenceDim, bool, bool], Node] = {}
        self._indices: dict[tuple[SequenceDim, bool, torch.device], Node] = {}
        self._last_input = graph.find_nodes(op="placeholder")[-1]
        if isinstance(permutation.order, LateOrder):
            self._first(self.nodes[permutation.order.by])

    def feed(self, node: Node) -> None:
        """Give ``node`` its inputs in the order that it wants them in."""
        way = self._permutation.ways.get(node.name)
        wanted = [None] * len(tensor_inputs(node)) if way is None else way.inputs
        whole = node.op == "output"  # results are whole, on every rank
        node.args, node.kwargs = with_inputs(node, lambda x, n: self._brought(x, wanted[n], whole))

    def _brought(self, value: Node, wanted: SequenceDim | None, whole: bool) -> Node:
        producer, index = resolve(value)
        way = self._permutation.ways.get(producer.name)
        held = None if way is None else way.outputs[index]
        if held == wanted:
            return value
        natural = value if held is None else self._permute(value, held, True, whole)
        return natural if wanted is None else self._permute(natural, wanted, False, whole)

    def _permute(self, value: Node, at: SequenceDim, back: bool, whole: bool) -> Node:
        key = value, at, back, whole
        if key not in self._permuted:
            order = self._permutation.order
            if moves_parts(order, value, at) and not whole:
                self._permuted[key] = self._moved(order, value, at, back)
            else:
                index = self._index(value, at, back)
                select = torch.ops.aten.index_select.default
                self._permuted[key] = self._after([value, index], select, value, at.dim, index)
        return self._permuted[key]

    def _moved(self, order: Order | LateOrder, value: Node, at: SequenceDim, back: bool) -> Node:
        """A call of the order's own op."""
        assert order.move is not None
        by = self.nodes[order.by] if isinstance(order, LateOrder) else None
        after = [value] if by is None else [value, by]
        return self._after(after, _op(order.move[0]), value, by, order.move[1], at.dim, back)

    def _after(self, made: list[Node], op: Any, *args: Any) -> Node:
        """A call that comes after these nodes."""
        after = max(made)
        after = self._last_input if after.op == "placeholder" else after
        with self._graph.inserting_after(after):
            return call(self._graph, op, *args)

    def _index(self, value: Node, at: SequenceDim, back: bool) -> Node:
        """The permutation of a whole dim, as a node."""
        like, order = value.meta["val"], self._permutation.order
        key = replace(at, dim=0), back, like.device
        if key not in self._indices:
            if isinstance(order, LateOrder):
                self._indices[key] = self._made(order, at, back, like)
            else:
                self._indices[key] = self._constant(order, at, back, like)
        return self._indices[key]

    def _constant(self, order: Order, at: SequenceDim, back: bool, like: Tensor) -> Node:
        """A placeholder for a permutation that no batch changes."""
        dim = order.indices(at.outer, at.inner, back)
        name = f"c_order_{len(self.nodes)}_{len(self.constants)}"
        with self._graph.inserting_after(self._last_input):
            node = self._last_input = self._graph.placeholder(name)
        node.meta["val"] = like.new_empty(dim.size, dtype=torch.int64)
        self.constants[node.name] = torch.from_numpy(dim).to(like.device)
        return node

    def _made(self, order: LateOrder, at: SequenceDim, back: bool, like: Tensor) -> Node:
        """A call that makes the permutation from what the batch says."""
        by, op = self.nodes[order.by], _op(order.make)
        length = self._length(order, like.shape[at.dim])
        how = order.name, length, at.outer, at.inner, back, like.device.type
        after = by if isinstance(length, int) else max(by, length)
        with self._graph.inserting_after(max(after, self._last_input)):
            return call(self._graph, op, by, *how)

    def _length(self, order: LateOrder, size: int | torch.SymInt) -> int | Node:
        """The length of the order; if sizes are open, read from an input that has the same size."""
        if isinstance(size, int):
            return order.length
        for node in self._graph.find_nodes(op="placeholder"):
            for dim, other in enumerate(getattr(node.meta["val"], "shape", ())):
                if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr:
                    with self._graph.inserting_after(self._last_input):
                        return call(self._graph, torch.ops.aten.sym_size.int, node, dim)
        raise NotOpen("tokens are brought in another order where no input has as many")

    def _first(self, node: Node) -> None:
        """Move a node, and what it is made of, before all other calls."""
        made_of, queue = {node}, [node]
        for each in queue:
            queue += [x for x in each.all_input_nodes if x not in made_of]
            made_of.update(each.all_input_nodes)
        at = self._last_input
        for each in list(self._graph.nodes):
            if each in made_of and each.op != "placeholder":
                at.append(each)
                at = each


def _op(name: str) -> Any:
    """A registered op."""
    namespace, _, own = name.partition("::")
    return getattr(getattr(torch.ops, namespace), own).default
