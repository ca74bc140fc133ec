"""Cross entropy that stays exact when its tokens are cut.

The mean over tokens with ``ignore_index`` divides by a count that differs from rank to rank, and
the mean of means is not the mean. So a captured ``cross_entropy`` becomes an annotated op that
returns sum and count, both of which may be cut and added up, and one division.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from annotations.library.declaration import register_op

from .nodes import argument_of, call

MEAN, SUM = 1, 2  # torch's numbers for reduction


def _annotation(logits: Tensor, target: Tensor, **_: object) -> str:
    dims = " ".join(f"t{n}+" for n in range(target.ndim))
    return f"{dims} c^, {dims} -> 1, 1"


def _fake(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    scalar = logits.new_empty((), dtype=_sum_dtype(logits.dtype))
    return scalar, torch.empty_like(scalar)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over tokens are at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@register_op(
    _annotation,
    name="seqshard::cross_entropy_sum",
    title="cross_entropy",
    differentiable=("logits",),
    fake=_fake,
)
def cross_entropy_sum(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' cross entropy and the number of tokens that count.

    Args:
        logits: [..., classes]. target: [...], int64. ignore_index: target of tokens left out.
    Returns:
        Two scalars, fp32 (fp64 for fp64).
    """
    wide = logits.to(_sum_dtype(logits.dtype)).flatten(0, -2)
    total = torch.nn.functional.cross_entropy(
        wide, target.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    return total, (target != ignore_index).sum().to(wide.dtype)


def exact_cross_entropy(graph: Graph) -> None:
    """Replace cross entropy (mean or sum, no class weights, no smoothing) in a captured graph.

    Class weights and label smoothing are left as they are; their tokens are then not cut.
    """
    op = torch.ops.aten.cross_entropy_loss.default
    for node in graph.find_nodes(op="call_function", target=op):
        logits, target = node.args[:2]
        value, reduction = target.meta["val"], argument_of(node, "reduction")
        weighted = argument_of(node, "weight") is not None or argument_of(node, "label_smoothing")
        of_classes = not value.is_floating_point() and value.ndim > 0
        if of_classes and not weighted and reduction in (MEAN, SUM):
            ignore_index = argument_of(node, "ignore_index")
            _replace(graph, node, logits, target, ignore_index, reduction)


def _replace(
    graph: Graph, node: Node, logits: Node, target: Node, ignore_index: int, reduction: int
) -> None:
    aten = torch.ops.aten
    logits, target, classes_last = _unflattened(logits, target)
    scalar = node.meta["val"]
    with graph.inserting_before(node):
        if not classes_last:
            logits = call(graph, aten.movedim.int, logits, 1, -1)
        pair = graph.call_function(
            torch.ops.seqshard.cross_entropy_sum.default, (logits, target, ignore_index)
        )
        wide = scalar.to(_sum_dtype(scalar.dtype))
        pair.meta["val"] = (wide, wide)
        pair.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
        total = call(graph, operator.getitem, pair, 0)
        if reduction == MEAN:
            total = call(graph, aten.div.Tensor, total, call(graph, operator.getitem, pair, 1))
        if wide.dtype != scalar.dtype:
            total = call(graph, aten._to_copy.default, total, dtype=scalar.dtype)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _unflattened(logits: Node, target: Node) -> tuple[Node, Node, bool]:
    """Undo ``logits.view(-1, classes), target.view(-1)``: a cut dim must not be flattened away.

    Also says whether the classes are the last dim of logits; torch has them in dim 1.
    """
    aten = torch.ops.aten
    views = aten.view.default, aten._unsafe_view.default, aten.reshape.default
    if logits.target in views and target.target in views:
        whole_logits, whole_target = logits.args[0], target.args[0]
        assert isinstance(whole_logits, Node) and isinstance(whole_target, Node)
        shape, classes = whole_logits.meta["val"].shape, logits.meta["val"].shape[-1]
        flat = logits.meta["val"].ndim == 2 and shape[-1] == classes
        if flat and shape[:-1] == whole_target.meta["val"].shape:
            return whole_logits, whole_target, True
    return logits, target, logits.meta["val"].ndim == 2
