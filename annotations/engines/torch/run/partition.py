"""Which values a forward saves for its backward, and which are computed again: partitioners of a
joint graph, for AOTAutograd."""

from __future__ import annotations

from typing import Any

from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..capture.checkpointed import region_of
from .local_graph import communicates, drop_unused, results_of, simplify

Halves = tuple[GraphModule, GraphModule]  # forward and backward


def save_all(joint: GraphModule, inputs: Any, **options: Any) -> Halves:
    """Save what the backward needs, as autograd does: nothing is computed again."""
    simplify(joint.graph)
    return _checked(*default_partition(joint, inputs, **options))


def save_regions(joint: GraphModule, inputs: Any, **options: Any) -> Halves:
    """Save what the backward needs, but of checkpointed calls only what ops that communicate have
    returned, and what is read outside; the rest is computed again."""
    simplify(joint.graph)
    _tag_regions(joint.graph, others=True)
    return _checked(*min_cut_rematerialization_partition(joint, inputs, **options))


def save_least(joint: GraphModule, inputs: Any, **options: Any) -> Halves:
    """Save the fewest bytes that spare all that is not cheap once it is compiled; checkpointed
    calls are computed again, and nothing that communicates is."""
    simplify(joint.graph)
    _tag_regions(joint.graph, others=False)
    return _checked(*min_cut_rematerialization_partition(joint, inputs, **options))


def _tag_regions(graph: Graph, *, others: bool) -> None:
    """Say to the partitioner what is computed again: checkpointed calls, but for what ops that
    communicate have returned. ``others``: all else is saved, rather than what is cheapest."""
    of_backward: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(source in of_backward for source in node.all_input_nodes):
            of_backward.add(node)
        elif node.op == "call_function":
            region = region_of(node)
            if region is None and not others:
                continue
            again = region is not None and not communicates(node)
            node.meta["ac_graph_id"] = -1 if region is None else region
            node.meta["recompute"] = (
                CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
            )
    for node in graph.nodes:
        if communicates(node) and node not in of_backward:
            for result in results_of(node):
                result.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                result.meta.setdefault("ac_graph_id", -1)


def _checked(forward: GraphModule, backward: GraphModule) -> Halves:
    """Nothing that communicates may run again: ranks could differ in what they save."""
    for each in (forward, backward):
        drop_unused(each.graph)
    first, second = (
        {node.name for node in each.graph.nodes if communicates(node)}
        for each in (forward, backward)
    )
    assert not first & second, f"run again in the backward: {sorted(first & second)}"
    return forward, backward
