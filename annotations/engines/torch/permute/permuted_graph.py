"""A captured graph of which some ops run on a sequence in another order.

tokens -- embedding -- attention -- linear -- logits
tokens -- index_select -- embedding -- attention -- linear -- index_select -- logits
            (order)                    (told)                   (back)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, Node

from annotations.registry import record_of
from annotations.rules import Order

from ..capture.capture import Captured
from ..capture.losses import call
from ..capture.nodes import is_getitem, resolve, tensor_inputs, with_inputs
from .token_axes import Along, Place


@dataclass(frozen=True, eq=False)
class SequencePermutation:
    """Which ops run on the sequence in another order.

    Attributes:
        order: which token stands at each place.
        ways: by name, how each of these ops goes along the sequence.
        told: by name, what those that must be told of the order are told: arguments by name.
    """

    order: Order
    ways: Mapping[str, Along]
    told: Mapping[str, Mapping[str, Any]]


def reordered(captured: Captured, hoisting: SequencePermutation) -> Captured:
    """``captured`` as ``hoisting`` says: the same function of tensors in natural order."""
    graph = copy.deepcopy(captured.graph)
    rewriting = _Rewriting(graph, hoisting)
    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and not is_getitem(node):
            rewriting.feed(node)
    for name, told in hoisting.told.items():
        tell(rewriting.nodes[name], told)
    graph.lint()
    return replace(captured, graph=graph, constants={**captured.constants, **rewriting.constants})


def tell(node: Node, told: Mapping[str, Any]) -> None:
    """Give a call of an annotated op other arguments, by name."""
    record = record_of(node.target)
    assert record is not None
    arguments = record.arguments(node.args, node.kwargs)
    assert told.keys() <= arguments.keys()
    node.args, node.kwargs = tuple({**arguments, **told}.values()), {}


class _Rewriting:
    """A graph as it is rewritten. A tensor is brought into an order once, for all its readers.

    Attributes:
        nodes: by name, those that were there before.
        constants: by placeholder's name, the permutations that were put in.
    """

    def __init__(self, graph: Graph, hoisting: SequencePermutation) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        self.constants: dict[str, Tensor] = {}
        self._graph, self._hoisting = graph, hoisting
        self._permuted: dict[tuple[Node, Place, bool], Node] = {}
        self._indices: dict[tuple[Place, bool, torch.device], Node] = {}
        self._last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def feed(self, node: Node) -> None:
        """Give ``node`` its inputs in the order that it wants them in."""
        way = self._hoisting.ways.get(node.name)
        wanted = [None] * len(tensor_inputs(node)) if way is None else way.inputs
        node.args, node.kwargs = with_inputs(node, lambda x, n: self._brought(x, wanted[n]))

    def _brought(self, value: Node, wanted: Place | None) -> Node:
        producer, index = resolve(value)
        way = self._hoisting.ways.get(producer.name)
        held = None if way is None else way.outputs[index]
        if held == wanted:
            return value
        natural = value if held is None else self._permute(value, held, back=True)
        return natural if wanted is None else self._permute(natural, wanted, back=False)

    def _permute(self, value: Node, place: Place, *, back: bool) -> Node:
        key = value, place, back
        if key not in self._permuted:
            index = self._index(value, place, back)
            after = self._last_input if value.op == "placeholder" else value
            with self._graph.inserting_after(after):
                self._permuted[key] = call(
                    self._graph, torch.ops.aten.index_select.default, value, place.dim, index
                )
        return self._permuted[key]

    def _index(self, value: Node, place: Place, back: bool) -> Node:
        """A placeholder for the permutation of a whole dim."""
        like = value.meta["val"]
        key = replace(place, dim=0), back, like.device
        if key not in self._indices:
            tokens = (
                np.argsort(self._hoisting.order.tokens) if back else self._hoisting.order.tokens
            )
            inner = tokens[:, None] * place.inner + np.arange(place.inner)
            dim = np.arange(place.outer)[:, None] * inner.size + inner.reshape(-1)
            name = f"c_order_{len(self.nodes)}_{len(self.constants)}"
            with self._graph.inserting_after(self._last_input):
                node = self._last_input = self._graph.placeholder(name)
            node.meta["val"] = like.new_empty(dim.size, dtype=torch.int64)
            self.constants[node.name] = torch.from_numpy(dim.reshape(-1)).to(like.device)
            self._indices[key] = node
        return self._indices[key]
