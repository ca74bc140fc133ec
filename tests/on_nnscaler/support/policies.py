"""Policies written by hand, in both of nnscaler's styles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nnscaler.graph import IRGraph
from nnscaler.ir.operator import IRDataOperation, IRFwOperation
from nnscaler.policies import OpPartition, OpPlan, auto_multiref, get_pas_ops

SEQUENCE = (0, 1)  # of the first input, [b, l, d]
ON_SEQUENCE = ("linear", "gelu")  # names of ops of the plain model


def cut_and_assign(
    graph: IRGraph,
    node: Any,
    cuts: list[tuple[tuple[int, int], int]],
    devices: list[int] | None = None,
) -> None:
    """Cut an op once for each ((input, dim), parts), each time all parts.

    An (input, dim) of (-1, -1) replicates. Part n goes to ``devices[n]``, by default n.
    """
    nodes = [node]
    for (index, dim), parts in cuts:
        if index < 0:
            nodes = [n for node in nodes for n in graph.replicate(node, times=parts)]
        else:
            nodes = [
                part
                for node in nodes
                for part in graph.partition(
                    node, node.algorithm("dim"), idx=index, dim=dim, num=parts
                )
            ]
    for device, part in zip(devices or range(len(nodes)), nodes, strict=True):
        graph.assign(part, device)


def _with_cuts(graph: IRGraph, config: Any, chosen: dict[str, list]) -> IRGraph:
    # A tensor used twice, once whole and once in parts, needs a node between.
    auto_multiref(graph)
    for node in graph.select(ntype=(IRFwOperation, IRDataOperation)):
        if node.name != "multiref":
            cut_and_assign(graph, node, chosen.get(node.name, [((-1, -1), config.plan_ngpus)]))
    return graph


def sequence_by_graph(graph: IRGraph, config: Any) -> IRGraph:
    """The older style: cut and assign every op oneself."""
    return _with_cuts(
        graph, config, {name: [(SEQUENCE, config.plan_ngpus)] for name in ON_SEQUENCE}
    )


def sequence_by_plans(graph: IRGraph, config: Any) -> Iterator[OpPlan]:
    """The newer style: say which ops to cut; nnscaler replicates the others."""
    for node in get_pas_ops(graph):
        if node.name in ON_SEQUENCE:
            yield OpPlan(node, partition=OpPartition(*SEQUENCE))


def two_by_two(graph: IRGraph, config: Any) -> IRGraph:
    """Two cuts on four devices: linears on batch and sequence, products on batch and columns.

    The second may not cut an activation that the first leaves whole: nnscaler 0.9 gathers such an
    activation's gradient in the wrong order, unless DISABLE_REDUCE_SCATTER_ADAPTER is 1 in the
    environment. And neither may cut a weight that the other leaves whole: it has no plan for that.
    """
    chosen = {
        "linear": [((0, 0), 2), (SEQUENCE, 2)],
        "matmul": [((0, 0), 2), ((1, 2), 2)],
    }
    return _with_cuts(graph, config, chosen)


def two_stages(graph: IRGraph, config: Any) -> Iterator[OpPlan]:
    """A pipeline: the second stage starts with the second layer."""
    for node in get_pas_ops(graph):
        if node.fqn.startswith("blocks.1"):
            yield OpPlan(node, stage_id=1)
            return


def attention(
    graph: IRGraph,
    config: Any,
    cuts: list[tuple[str, int]],
    devices: list[int] | None = None,
    name: str = "attn",
) -> IRGraph:
    """Cut ops with ``name`` in their own once for each (identifier, parts), replicate the rest.

    An identifier of "" replicates. ``devices`` are those of the parts, if not in their order.
    """
    auto_multiref(graph)
    for node in graph.select(ntype=(IRFwOperation, IRDataOperation)):
        if node.name == "multiref":
            continue
        if name in node.name:
            chosen = [(place_of(node, identifier), parts) for identifier, parts in cuts]
            cut_and_assign(graph, node, chosen, devices)
        else:
            cut_and_assign(graph, node, [((-1, -1), config.plan_ngpus)])
    return graph


def place_of(node: Any, identifier: str) -> tuple[int, int]:
    """The (input, dim) by which nnscaler cuts ``identifier``; (-1, -1) for ""."""
    if not identifier:
        return -1, -1
    return next(
        (index, dim)
        for index, dim in node.transform_space()
        if node.anno.input(index).dims[dim].identifiers[0] == identifier
    )


def two_stages_on_sequence(graph: IRGraph, config: Any) -> Iterator[OpPlan]:
    """The second stage starts with the second layer; attention is cut inside both."""
    begun = False
    for node in get_pas_ops(graph):
        starts = not begun and node.fqn.startswith("layers.1")
        begun = begun or starts
        cut = OpPartition(*place_of(node, "l")) if "_attn" in node.name else None
        if cut or starts:
            yield OpPlan(node, partition=cut, stage_id=1 if starts else -1)
