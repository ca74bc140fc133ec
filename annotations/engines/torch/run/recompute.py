"""Activation checkpointing: which values a forward keeps, and which are computed again.

A region is a run of nodes of one call of ``torch.utils.checkpoint`` in the user's model
(:mod:`.checkpointed`). It keeps only results that are read outside of it, and results of ops that
communicate: as in torch's selective checkpointing, these ops are not run again. On DTensors
``checkpoint`` runs a region; a partitioner divides a traced graph into two halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..capture.checkpointed import region_of
from ..capture.nodes import is_getitem, resolve, tensor_inputs
from .local_graph import communicates, drop_unused, is_exchange, results_of, simplify

Halves = tuple[GraphModule, GraphModule]  # forward and backward
Values = dict[tuple[Node, int], Any]  # by op and number of the result


def run_again(
    nodes: Sequence[Node], values: Values, execute: Callable[[Values, Sequence[Node]], None]
) -> None:
    """Run a region now, and again in the backward. ``values`` gets only the results that are read
    outside of the region; ``execute`` runs ``nodes`` and adds all results to what it is given."""
    inside = set(nodes)
    read = dict.fromkeys(resolve(x) for node in nodes for x in tensor_inputs(node))
    reads = [key for key in read if key[0] not in inside]
    writes = list(dict.fromkeys(
        resolve(user) if is_getitem(user) else (node, 0)
        for node in nodes
        for user in node.users
        if not inside.issuperset(user.users if is_getitem(user) else [user])
    ))  # fmt: skip

    def region(*inputs: Any) -> tuple[Any, ...]:
        inner = dict(zip(reads, inputs, strict=True))
        execute(inner, nodes)
        return tuple(inner[key] for key in writes)

    results = checkpoint(
        region,
        *[values[key] for key in reads],
        use_reentrant=False,
        preserve_rng_state=False,  # random ops draw from a seed among the inputs
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )
    values.update(zip(writes, results, strict=True))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = is_exchange(op)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(joint: GraphModule, inputs: Any, **options: Any) -> Halves:
    """Save what the backward needs, as autograd does: nothing is computed again."""
    simplify(joint.graph)
    return _checked(*default_partition(joint, inputs, **options))


def save_regions(joint: GraphModule, inputs: Any, *, others: bool = True, **options: Any) -> Halves:
    """Save what the backward needs, but compute checkpointed calls again. If ``others`` is False,
    also compute again what is cheap once it is compiled, so that the fewest bytes are saved."""
    simplify(joint.graph)
    _tag_regions(joint.graph, others=others)
    return _checked(*min_cut_rematerialization_partition(joint, inputs, **options))


def _tag_regions(graph: Graph, *, others: bool) -> None:
    """Tell the partitioner what to compute again, and what to save."""
    forward, backward = [], set[Node]()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            forward.append(node)
    for node in forward:
        region = region_of(node)
        if region is not None or others:
            again = region is not None and not communicates(node)
            policy = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
            node.meta |= {"ac_graph_id": -1 if region is None else region, "recompute": policy}
    for node in filter(communicates, forward):
        for result in results_of(node):
            result.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            result.meta.setdefault("ac_graph_id", -1)


def _checked(forward: GraphModule, backward: GraphModule) -> Halves:
    """Check that nothing that communicates runs again: ranks could differ in what they save."""
    for each in (forward, backward):
        drop_unused(each.graph)
    first, second = (
        {node.name for node in each.graph.nodes if communicates(node)}
        for each in (forward, backward)
    )
    assert not first & second, f"run again in the backward: {sorted(first & second)}"
    return forward, backward
