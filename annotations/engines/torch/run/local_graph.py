"""Passes over a graph of ops on plain tensors, before it runs.

simplify: remove what changes nothing or is computed twice
overlap:  start messages as early as possible, and wait for them where they are first needed
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from annotations.registry import record_of

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_VIEWS = (*_RESHAPES, aten.expand.default, aten.alias.default, aten.detach.default)

# These put received data in its place; they are no reason to wait for it.
_PLACING = (
    *_RESHAPES,
    operator.getitem,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.clone.default,
)


def is_exchange(op: Any) -> bool:
    """Whether an op exchanges messages with other ranks, or waits for them: any op that is not
    torch's own, unless it is ours and its rule says that no split of it communicates."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    record = record_of(op)
    inside = record is None or bool(record.rule.communicates)
    return inside and op.namespace not in ("aten", "prims", "prim")


def communicates(node: Node) -> bool:
    """Whether ranks may exchange messages in a node. All ranks must run these in the same order."""
    return is_exchange(node.target) and not _waits(node)


def _waits(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def results_of(node: Node) -> list[Node]:
    """``node``, or the nodes that pick its results where it has several."""
    return [user for user in node.users if user.target is operator.getitem] or [node]


def output_of(graph: Graph) -> Node:
    """The node that returns the results."""
    return next(iter(reversed(graph.nodes)))


def simplify(graph: Graph) -> None:
    """Remove views that change nothing, reshapes of reshapes, and what is computed twice.

    What is returned stays a tensor of its own: a caller may change it in place.
    """
    returned = set(output_of(graph).all_input_nodes)
    memory = {_memory(node) for node in returned}
    known: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in returned:
            continue
        source = _same_view(node)
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if source is None and not communicates(node) and not draws:
            first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            source = None if first is node or _memory(node) in memory else first
        if source is not None:
            node.replace_all_uses_with(source)
    drop_unused(graph)


def drop_unused(graph: Graph) -> None:
    """Remove what no result depends on, also messages that are waited for but not used."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _same_view(node: Node) -> Node | None:
    """The input that a view equals, if any. A reshape of a reshape becomes a single one."""
    source = _source(node)
    if source is None:
        return None
    if node.target is source.target is aten.t.default:
        return _source(source)
    if node.target in _RESHAPES:
        while source.target in _RESHAPES:
            earlier = _source(source)
            if earlier is None or not earlier.meta["val"].is_contiguous():
                break
            source = earlier
            node.args = (source, *node.args[1:])
    if node.target not in _VIEWS:
        return None
    new, old = node.meta["val"], source.meta["val"]
    return source if new.shape == old.shape and new.stride() == old.stride() else None


def _source(node: Node) -> Node | None:
    first = node.args[0] if node.args else None
    return first if isinstance(first, Node) else None


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def overlap(graph: Graph) -> None:
    """Start each collective once what it sends is there, and wait for it where it is first used.

    Ops that communicate keep their order: it must be the same on all ranks.
    """
    place = {node: n for n, node in enumerate(graph.nodes)}
    coming = [node for node in graph.nodes if communicates(node)]
    coming.reverse()  # the next one last
    taken: dict[Node, None] = {}  # in the order in which they will run
    deferred: set[Node] = set()

    def missing(node: Node) -> set[Node]:
        """``node`` and the nodes that it needs, without those that are taken already."""
        found: set[Node] = set()
        left = [node]
        while left:
            each = left.pop()
            if each not in taken and each not in found:
                found.add(each)
                left += each.all_input_nodes
        return found

    def take(nodes: set[Node]) -> None:
        taken.update(dict.fromkeys(sorted(nodes, key=place.__getitem__)))
        while coming and coming[-1] in taken:
            coming.pop()

    for node in graph.nodes:
        # A node that waits for a message, or only places received data, is taken when it is needed.
        arriving = deferred.intersection(node.all_input_nodes) - taken.keys()
        if _waits(node) or (node.target in _PLACING and arriving):
            deferred.add(node)
            continue
        take(missing(node))
        # Start collectives if the nodes that they still need serve them alone.
        while coming and coming[-1].target.namespace == "_c10d_functional":  # type: ignore[union-attr]
            needed = missing(coming[-1])
            if not all(_is_own(each, needed) for each in needed - {coming[-1]}):
                break
            take(needed)
    for before, node in itertools.pairwise(taken):
        before.append(node)
    graph.lint()


def _is_own(node: Node, group: set[Node]) -> bool:
    """Whether a node can be run for a group of nodes alone."""
    return node.op != "placeholder" and not _waits(node) and group.issuperset(node.users)
