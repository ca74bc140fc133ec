"""Next-token losses on whole logits.

    cross_entropy(logits[:, :-1], labels[:, 1:])
    cross_entropy(logits, pad(labels[:, 1:], with one token more that is ignored))

are the same sum and count, but the second is cut where the rest of the model is cut, and its tokens
may be in any order. It costs computing the loss of a token that is ignored.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..capture.nodes import (
    argument_of,
    call,
    example_shape,
    is_whole_view,
    tensor_inputs,
    with_inputs,
)
from .token_axes import SequenceDim, along

aten = torch.ops.aten


def whole_logits(graph: Graph) -> None:
    """Replace slices of logits along the tokens by padded targets, in a captured graph.

    Done if every op between the slice and the loss treats tokens one by one, and nothing else
    reads its result.
    """
    op = torch.ops.seqshard.cross_entropy_sum.default
    for node in graph.find_nodes(op="call_function", target=op):
        for dim in range(node.args[1].meta["val"].ndim):
            _lift(graph, node, dim)
    graph.eliminate_dead_code()


def _lift(graph: Graph, loss: Node, dim: int) -> None:
    """Replace the slice of one loss, along one dim of its targets."""
    logits, targets, ignore_index = loss.args
    assert isinstance(logits, Node) and isinstance(targets, Node)
    found = _sliced(logits, SequenceDim(dim), example_shape(logits.meta["val"].shape)[dim])
    if found is None or is_whole_view(found[0]):
        return
    cut, at, path = found
    whole, length = cut.args[0], cut.meta["val"].shape[at]
    assert isinstance(whole, Node)
    size = whole.meta["val"].shape[at]
    start = argument_of(cut, "start") or 0
    start = max(start + size, 0) if start < 0 else start
    new = whole
    with graph.inserting_before(loss):
        for node, slot in reversed(path):
            new = _again(graph, node, slot, new)
        expected = list(logits.meta["val"].shape)
        expected[dim] = size
        if list(new.meta["val"].shape) != expected:
            return  # an op on the way names the length itself; the new nodes are dead
        last = targets.meta["val"].ndim - 1 - dim
        pads = [0, 0] * last + [start, size - length - start]
        padded = call(graph, aten.constant_pad_nd.default, targets, pads, ignore_index)
    loss.args = (new, padded, ignore_index)


def _sliced(
    node: Node, at: SequenceDim, length: int
) -> tuple[Node, int, list[tuple[Node, int]]] | None:
    """The slice along a sequence that ``node`` comes from, its dim, and the ops in between, last
    first, each with the number of the input through which the sequence comes."""
    path: list[tuple[Node, int]] = []
    while len(node.users) == 1:
        if node.target is aten.slice.Tensor:
            dim = argument_of(node, "dim") % node.meta["val"].ndim
            if dim == at.dim:
                return (node, dim, path) if argument_of(node, "step") == 1 else None
        way = along(node, at, length)
        slots = [n for n, p in enumerate(way.inputs) if p is not None] if way else []
        if way is None or len(slots) != 1:
            return None
        following = way.inputs[slots[0]]
        assert following is not None
        if (following.outer, following.inner) != (1, 1):
            return None
        path.append((node, slots[0]))
        node, at = tensor_inputs(node)[slots[0]], following
    return None


def _again(graph: Graph, node: Node, slot: int, source: Node) -> Node:
    """A copy of ``node`` with another tensor in place of one input."""
    args, kwargs = with_inputs(node, lambda x, n: source if n == slot else x)
    new = call(graph, node.target, *args, **kwargs)
    new.meta = {**node.meta, "val": new.meta["val"]}
    return new
