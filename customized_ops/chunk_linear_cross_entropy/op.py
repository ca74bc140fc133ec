"""The op in a graph: the loss of each token, its annotation, its partition rule.

    split on       forward                                    gradients
    l and others   nothing moves                              dweight, dbias: parts to add up
    v              max, Σ exp, target's logit: all-reduced    dhidden: parts to add up

Reductions over tokens are plain torch on top (:mod:`.loss`), so engines split them as they split
any sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite

from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.comm_groups import comm_by_name
from ..ring_attention.core.merge.merge import accumulation_dtype
from ..ring_attention.op.arguments import ArgumentError
from .chunks import Head, finite, gradients, statistics

TITLE = "chunk_linear_cross_entropy"


def first_row(rows: int, vocab_size: int, comm: Comm) -> int:
    """Index of this rank's first row of the weight, which is cut the way DTensor's ``Shard`` cuts.

    Raises:
        ArgumentError: this rank should hold a different number of rows.
    """
    each = -(-vocab_size // comm.size)
    first = min(comm.rank * each, vocab_size)
    expected = min(each, vocab_size - first)
    if rows != expected:
        raise ArgumentError(
            f"{TITLE}: weight has {rows} rows, but of vocab_size={vocab_size} rank {comm.rank} of "
            f"{comm.size} holds {expected}: {each} on each rank, the last ones less"
        )
    return first


def _annotation(hidden: Tensor, bias: Tensor | None, **_: Any) -> str:
    lead = "b" if hidden.ndim == 3 else "*"  # policies know a batch by this name
    tokens = f"{lead} l"
    return f"{tokens} d^, v d^, {tokens}{', v' if bias is not None else ''} -> {tokens}, {tokens}"


def _fake(hidden: Tensor, target: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    loss = hidden.new_empty(target.shape, dtype=accumulation_dtype(hidden.dtype))
    return loss, torch.empty_like(loss)


def _vocab_arguments(site: SplitSite) -> dict[str, Any]:
    # The engine itself adds up the gradients of hidden over the ranks.
    return {"vocab_group": site.group, "reduce_hidden": False}


def _vocab_cost(
    bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any], itemsize: int
) -> InnerCost:
    """Three numbers a token, all-reduced in a ring."""
    tokens = torch.Size(bound.output_shapes()[0] or ()).numel()
    received = 2 * (site.parts - 1) * 3 * tokens * max(4, itemsize) // site.parts
    largest = -(-site.size // site.parts)
    return InnerCost("max, sum and target's logit", received, 0, largest * site.parts / site.size)


def _flops(bound: BoundAnnotation, given: Mapping[str, Any]) -> float:
    return 2.0 * given["hidden"].numel() * bound.sizes["v"]


RULE = PartitionRule(
    {"v": Communicates(_vocab_arguments, _vocab_cost, whole_gradients=True)}, _flops
)


def _backward(
    dloss: Tensor | None,
    dlse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float,
    chunk_size: int,
    vocab_size: int,
    vocab_group: str,
    reduce_hidden: bool,
    wanted: Sequence[bool] | None,
    loss: Tensor,
    lse: Tensor,
) -> tuple[Tensor | None, ...]:
    comm = comm_by_name(vocab_group)
    head = Head(weight, bias, first_row(len(weight), vocab_size, comm), softcap, chunk_size)
    add_up = reduce_hidden and comm.size > 1
    flat = target.reshape(-1)
    g, s = (lse.new_zeros(flat.shape) if x is None else x.reshape(-1) for x in (dloss, dlse))
    g = _masked(g, flat, ignore_index, vocab_size)
    want_hidden, want_weight, want_bias = wanted or (True, True, True)
    dhidden, dweight, dbias = gradients(
        head,
        hidden.reshape(-1, hidden.shape[-1]),
        flat,
        lse.reshape(-1),
        g,
        s,
        lse.dtype if add_up else hidden.dtype,
        # A gradient that is added up is always computed: otherwise other ranks would wait.
        (want_hidden or add_up, want_weight, want_bias),
    )
    if add_up and dhidden is not None:
        with comm.doing("chunk_linear_cross_entropy, backward"):
            comm.all_reduce(dhidden, "sum")
    return (
        None if dhidden is None else dhidden.view(hidden.shape).to(hidden.dtype),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(weight.dtype),
    )


@register_op(
    _annotation,
    name=f"seqshard::{TITLE}",
    title=TITLE,
    rule=RULE,
    differentiable=("hidden", "weight", "bias"),
    fake=_fake,
    backward=_backward,
)
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float,
    chunk_size: int,
    vocab_size: int,
    vocab_group: str,
    reduce_hidden: bool,
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """The op in a graph: loss and lse of each token.

    Args:
        hidden: [*, l, d]. weight: [v, d]. target: int64[*, l]. bias: [v] or None.
        chunk_size: tokens at a time, 0 to choose.
        vocab_size: rows of the whole weight; ``weight`` holds this rank's share in vocab_group.
        reduce_hidden: whether the gradient of hidden is added up over vocab_group here.
        wanted: for the backward, which of hidden, weight and bias need a gradient; callers leave
            it None.
    """
    comm = comm_by_name(vocab_group)
    head = Head(weight, bias, first_row(len(weight), vocab_size, comm), softcap, chunk_size)
    flat = target.reshape(-1)
    lse, at = statistics(head, hidden.reshape(-1, hidden.shape[-1]), flat)
    if comm.size > 1:
        with comm.doing("chunk_linear_cross_entropy, forward"):
            top = finite(comm.all_reduce(lse.clone(), "max"))
            total, at = comm.all_reduce(torch.stack([(lse - top).exp_(), at]), "sum")
        lse = total.log().add_(top)
    loss = _masked(lse - at, flat, ignore_index, vocab_size)
    return loss.view(target.shape), lse.view(target.shape)


def _masked(x: Tensor, target: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
    """``x`` of each token; 0 for tokens left out, NaN for those whose target does not exist."""
    missing = (target < 0) | (target >= vocab_size)
    return x.masked_fill(missing, torch.nan).masked_fill(target == ignore_index, 0.0)


@register_op(
    "? -> ?",
    name=f"seqshard::{TITLE}_tokens",
    differentiable=(),
    fake=lambda target, **_: target.new_empty(()),
)
def count_tokens(target: Tensor, ignore_index: int, group: str) -> Tensor:
    """How many tokens count, over the ranks of a group; an int64 scalar."""
    return comm_by_name(group).all_reduce((target != ignore_index).sum(), "sum")
