"""Equal layers: a model's blocks are planned once, however often they occur in it.

    blocks.0.attention.wq   blocks.1.attention.wq   ...   ->   one representative, the first

A block is all that the graph does under one module path up to its first number. Blocks are equal if
they do the same ops on the same shapes, wired in the same way, and may run in the same ways.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch.fx import Node

from ..capture.capture import Captured
from ..capture.nodes import is_getitem, resolve, signature, tensor_inputs


def module_of(node: Node) -> str:
    """Path of the module that called an op; empty for the outermost."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].removeprefix("L['self'].") if stack else ""


def representatives(captured: Captured, limits: Mapping[Node, Hashable]) -> dict[Node, Node]:
    """For each op the one that stands for it; most are their own.

    Args:
        limits: what else two ops must have in common to be planned as one.
    """
    blocks: dict[str, list[Node]] = {}
    found: dict[Node, Node] = {}
    for node in captured.graph.nodes:
        if not is_getitem(node):
            found[node] = node
            path = captured.attributes.get(node.name, module_of(node))
            if block := _block(path):
                blocks.setdefault(block, []).append(node)
    first: dict[Any, list[Node]] = {}
    for block, nodes in blocks.items():
        key = (block.rpartition(".")[0], _structure(block, nodes, captured, limits))
        for node, like in zip(nodes, first.setdefault(key, nodes), strict=True):
            found[node] = like
    return found


def _block(path: str) -> str:
    """``blocks.3`` of ``blocks.3.attention.wq``; empty where the path has no number."""
    names = path.split(".")
    at = next((n for n, name in enumerate(names) if name.isdecimal()), None)
    return "" if at is None else ".".join(names[: at + 1])


def _structure(
    block: str, nodes: list[Node], captured: Captured, limits: Mapping[Node, Hashable]
) -> Hashable:
    place = {node: n for n, node in enumerate(nodes)}
    described = []
    for node in nodes:
        inputs = tensor_inputs(node)
        wired = tuple((place.get(resolve(x)[0]), resolve(x)[1]) for x in inputs)
        name = captured.attributes.get(node.name, "").removeprefix(block)
        described.append((signature(node, inputs), wired, name, limits.get(node)))
    return tuple(described)
