"""All that may be chosen for a graph: strategies of every op, and who hands what to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from annotations.progress import counted

from ..capture.capture import Captured
from ..capture.nodes import is_getitem, resolve, tensor_inputs, values_of
from ..plan.policies import OpSite, sites
from .op_strategies import Strategy, strategies_of
from .placements import Placements
from .reshard import ReshardStep, gradient_steps, steps

# The placements in which a tensor is read, and those of its gradient.
Reading = tuple[Placements, Placements]


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
        strategies: for each op, the first being to run it whole.
        edges: every tensor that one op hands to another.
        ops: the annotated ops, as policies see them.
        parameters: the placeholders of parameters.
        stored: each of these as it is kept, in its own dtype, which may be another than the one
            that the graph reads it in; without data.
        differentiated: whether a gradient of an op's results is wanted.
        parts: the mesh's shape. copies: of the model, data parallel.
    """

    captured: Captured
    strategies: Mapping[Node, list[Strategy]]
    edges: Sequence[Edge]
    ops: Sequence[OpSite]
    parameters: Mapping[Node, str]
    stored: Mapping[Node, Tensor]
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
    known: dict[object, list[Strategy]] = {}
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
    ops = sites(captured.graph, strategies)
    parts = tuple(mesh.shape)
    stored = {node: _in_dtype(node.meta["val"], parameters[name]) for node, name in names.items()}
    return Choices(captured, strategies, edges, ops, names, stored, differentiated, parts, copies)


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without data, in another dtype."""
    return torch.empty(value.shape, dtype=dtype, device="meta", requires_grad=value.requires_grad)


def _is_differentiated(node: Node, inputs: Sequence[Node], known: Mapping[Node, bool]) -> bool:
    value = values_of(node)[0]
    if node.op == "placeholder":
        return isinstance(value, Tensor) and value.requires_grad
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return floating and any(known[resolve(x)[0]] for x in inputs)


def move_steps(
    choices: Choices, producer: Node, tensor: Tensor, source: Placements, reading: Reading
) -> tuple[tuple[ReshardStep, ...], tuple[ReshardStep, ...]]:
    """The steps of a tensor to one of its readings, and those of its gradient back."""
    (target, grad), shape = reading, tuple(tensor.shape)
    there = steps(shape, source, target, choices.parts)
    whole = all(p.is_replicate() for p in source)
    if not choices.differentiated[producer] or (producer in choices.parameters and whole):
        return there, ()  # of a parameter that is whole each rank keeps its part of the gradient
    return there, gradient_steps(shape, grad, source, choices.parts)
