"""The annotated ops of a graph, as a policy sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from annotations.binding import BoundAnnotation
from annotations.registry import record_of

from ..capture.nodes import arguments_of, module_of
from .op_strategies import Strategy


@dataclass(frozen=True)
class OpSite:
    """An annotated op in the captured graph, as a policy sees it.

    Attributes:
        name: unique in the graph, e.g. ``ring_attn_1``. op: e.g. ``wrap_ring_attn_func``.
        module: path of the module that called it, e.g. ``layers.1.attention``.
        splits: identifiers it can be split on, along some axis of the mesh.
        communicates: those of them that communicate inside the op.
        bindings: its annotation over the call's shapes, all alternatives.
    """

    name: str
    op: str
    module: str
    splits: tuple[str, ...]
    communicates: tuple[str, ...]
    bindings: tuple[BoundAnnotation, ...] = field(repr=False)


def sites(graph: Graph, strategies: Mapping[Node, list[Strategy]]) -> list[OpSite]:
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
