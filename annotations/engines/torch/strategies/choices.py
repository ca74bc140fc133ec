"""All that may be chosen for a graph: strategies of every op, and which op reads which tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from annotations.binding import BoundAnnotation
from annotations.progress import counted
from annotations.registry import record_of

from ..capture.capture import Captured
from ..capture.nodes import arguments_of, is_getitem, module_of, resolve, tensor_inputs, values_of
from .op_strategies import Strategy, strategies_of
from .placements import Placements

# The placements in which a tensor is read, and those of its gradient.
Reading = tuple[Placements, Placements]


@dataclass(frozen=True)
class OpSite:
    """An annotated op in the captured graph, as a policy sees it.

    Attributes:
        name: unique in the graph, e.g. ``ring_attn_1``. op: e.g. ``wrap_ring_attn_func``.
        module: path of the module that called it, e.g. ``layers.1.attention``.
        splits: identifiers it can be split on, along some axis of the mesh.
        communicates: those of them that communicate inside the op.
        bindings: its annotation bound to the call's shapes, for each alternative.
    """

    name: str
    op: str
    module: str
    splits: tuple[str, ...]
    communicates: tuple[str, ...]
    bindings: tuple[BoundAnnotation, ...] = field(repr=False)

    @property
    def title(self) -> str:
        """The op as error messages call it."""
        return f"{self.name} ({self.op} in {self.module or 'the module'})"


@dataclass(frozen=True)
class Edge:
    """``consumer`` reads result ``index`` of ``producer`` as its input ``slot``."""

    producer: Node
    index: int
    consumer: Node
    slot: int


@dataclass(frozen=True, eq=False)
class Choices:
    """All strategies of a graph's ops, before one is chosen.

    Attributes:
        strategies: those of each op; the first is to run it whole.
        edges: every tensor that one op hands to another.
        ops: the annotated ops, as policies see them.
        parameters: the placeholders of parameters.
        kept: for each of these a tensor without data, in the dtype in which the parameter is kept;
            the graph may read it in another.
        differentiated: whether a gradient of an op's results is wanted.
        parts: the mesh's shape. copies: data-parallel copies of the model.
    """

    captured: Captured
    strategies: Mapping[Node, list[Strategy]]
    edges: Sequence[Edge]
    ops: Sequence[OpSite]
    parameters: Mapping[Node, str]
    kept: Mapping[Node, Tensor]
    differentiated: Mapping[Node, bool]
    parts: tuple[int, ...]
    copies: int


def find_choices(
    captured: Captured, mesh: DeviceMesh, parameters: Mapping[str, torch.dtype], copies: int = 1
) -> Choices:
    """Collect the strategies of every op over ``mesh``.

    Args:
        parameters: names of the attributes that are parameters, and the dtypes they are kept in.
    """
    known: dict[Any, list[Strategy]] = {}
    strategies: dict[Node, list[Strategy]] = {}
    edges = []
    names: dict[Node, str] = {}
    differentiated: dict[Node, bool] = {}
    for node in counted(list(captured.graph.nodes), "strategies of ops"):
        if is_getitem(node):
            continue
        name = captured.attributes.get(node.name, "")
        if name in parameters:
            names[node] = name
        strategies[node] = strategies_of(node, mesh, known, stored=node in names)
        inputs = tensor_inputs(node)
        for slot, source in enumerate(inputs):
            producer, index = resolve(source)
            edges.append(Edge(producer, index, node, slot))
        differentiated[node] = _is_differentiated(node, inputs, differentiated)
    ops = _sites(captured.graph, strategies)
    parts = tuple(mesh.shape)
    kept = {node: _in_dtype(node.meta["val"], parameters[name]) for node, name in names.items()}
    return Choices(captured, strategies, edges, ops, names, kept, differentiated, parts, copies)


def _sites(graph: Graph, strategies: Mapping[Node, list[Strategy]]) -> list[OpSite]:
    """The annotated ops of a graph, in order."""
    records = [(node, record_of(node.target)) for node in graph.nodes]
    return [
        OpSite(
            name=node.name,
            op=record.title,
            module=module_of(node),
            splits=tuple(dict.fromkeys(x for s in strategies[node] for x in s.split if x)),
            communicates=tuple(sorted(record.rule.communicates)),
            bindings=record.bindings(arguments_of(node, record)),
        )
        for node, record in records
        if record is not None
    ]


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without data, in another dtype."""
    return torch.empty(value.shape, dtype=dtype, device="meta", requires_grad=value.requires_grad)


def _is_differentiated(node: Node, inputs: Sequence[Node], known: Mapping[Node, bool]) -> bool:
    value = values_of(node)[0]
    if node.op == "placeholder":
        return isinstance(value, Tensor) and value.requires_grad
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return floating and any(known[resolve(x)[0]] for x in inputs)
