"""Shuffling packed hidden states in a model: the identity on one rank.

Same names, arguments and order as nnscaler's ``maybe_shuffle``. Each document is laid out zigzag by
itself, so that causal attention over packed documents is the same work on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from annotations import register_op
from annotations.rules import Reorders

from .core.comm import Comm
from .core.comm.comm_groups import GroupLike, comm_by_name, group_comm, group_name
from .core.layout import Layout
from .core.plan.exchanges.between_layouts import relayout
from .core.plan.exchanges.exchange import Exchange
from .op.arguments import ArgumentError, checked
from .op.tokens.call_layouts import BY_DOCUMENT
from .op.tokens.lengths import CuSeqlens, as_tensor, check_cu_seqlens, check_total, on_host
from .op.tokens.order_ops import MOVES_TOKENS, UNKNOWN, fetched, sent_home

SHUFFLE, UNSHUFFLE = "wrap_maybe_shuffle", "wrap_maybe_unshuffle"


def _orders(given: Mapping[str, Any]) -> tuple[str | None, str | None]:
    return (BY_DOCUMENT, None) if given["back"] else (None, BY_DOCUMENT)


def _exchange(
    x: Tensor, cu_seqlens: Tensor, back: bool, comm: Comm, whole: int = UNKNOWN
) -> Exchange:
    title = UNSHUFFLE if back else SHUFFLE
    cu = on_host(cu_seqlens)
    check_cu_seqlens(title, "cu_seqlens", cu)
    total = int(cu[-1])
    if whole != UNKNOWN:  # tokens that an engine cut: all ranks refuse a mismatch, or none
        check_total(title, "cu_seqlens", cu, whole)
    plain = Layout.contiguous(total, comm.size)
    zigzag = Layout.zigzag(total, comm.size, cu)
    if plain.sizes != zigzag.sizes:
        raise ArgumentError(
            f"{title}: laid out document by document the ranks would hold {list(zigzag.sizes)} "
            f"tokens instead of {list(plain.sizes)}, and their number must stay; pad each document "
            f"to a multiple of {2 * comm.size}, or use wrap_shuffle_func with a Layout"
        )
    if comm.size == 1:
        check_total(title, "cu_seqlens", cu, x.shape[0])
    elif x.shape[0] != plain.sizes[comm.rank]:
        raise ArgumentError(
            f"{title}: rank {comm.rank} of {comm.size} holds {x.shape[0]} tokens, but cu_seqlens "
            f"end at {total}, which is {plain.sizes[comm.rank]} here"
        )
    return relayout(*((zigzag, plain) if back else (plain, zigzag)), 0, comm.rank)


def _backward(grad: Tensor | None, x: Tensor, *how: Any) -> Tensor:
    cu_seqlens, back, group, total, _moved = how
    if grad is None:
        return x.new_zeros(x.shape)
    comm = comm_by_name(group)
    return sent_home(_exchange(x, cu_seqlens, back, comm, total), grad, x, 0, comm)


@register_op(
    "l *, e^ -> l *",
    name="seqshard::shuffle_documents",
    title=SHUFFLE,
    rule=replace(
        MOVES_TOKENS, reorders=Reorders("l", _orders, by="cu_seqlens"), repeatable=("cu_seqlens",)
    ),
    differentiable=("hidden_states",),
    fake=lambda hidden_states, **_: hidden_states.new_empty(hidden_states.shape),
    backward=_backward,
)
def shuffle_documents(
    hidden_states: Tensor, cu_seqlens: Tensor, back: bool, group: str, total: int = UNKNOWN
) -> Tensor:
    """The op in a graph: moves tokens to the zigzag layout of each document, or back.

    Args:
        total: tokens over all ranks where an engine has cut the sequence.
    """
    comm = comm_by_name(group)
    exchange = _exchange(hidden_states, cu_seqlens, back, comm, total)
    return fetched(exchange, hidden_states, 0, comm)


def layout_by_document(cu_seqlens: CuSeqlens, group_size: int) -> Layout:
    """The layout that :func:`wrap_maybe_shuffle` gives tokens over ``group_size`` ranks."""
    cu = on_host(as_tensor("wrap_maybe_shuffle", "cu_seqlens", cu_seqlens))
    return Layout.zigzag(int(cu[-1]), group_size, cu)


def wrap_maybe_shuffle(
    hidden_states: Tensor,
    cu_seqlens: CuSeqlens,
    enable_ring: bool = True,
    process_group: GroupLike = None,
) -> Tensor:
    """``l *, e^ -> l *``

    Move tokens from contiguous shards to ``Layout.zigzag(total, group_size, cu_seqlens)``.

    With a ``process_group`` of your own, pass that layout to attention on these tokens:
    ``layout=Layout.zigzag(total, group_size, cu_seqlens)``. Without a layout, attention takes the
    shards to be contiguous, and its result is wrong. Under an auto-parallelizer pass no layout: the
    engine follows the tokens from op to op, through :func:`wrap_maybe_unshuffle`, and refuses what
    mixes them.

    Args:
        hidden_states: [l, ...], this rank's tokens.
        cu_seqlens: [documents + 1], int32 or int64, cumulative lengths of the whole packed
            sequence, the same on every rank. Each rank must hold as many tokens in that layout as
            before, which is the case where each length is a multiple of 2 * group_size.
        enable_ring: False returns ``hidden_states``.
        process_group: a ProcessGroup, its global ranks in increasing order, or None (one rank: the
            identity). Leave it None under an auto-parallelizer, which fills it in.
    Raises:
        ValueError: ``cu_seqlens`` or ``hidden_states`` do not fit; the message says what would.
    """
    return _shuffled(hidden_states, cu_seqlens, enable_ring, process_group, back=False)


def wrap_maybe_unshuffle(
    hidden_states: Tensor,
    cu_seqlens: CuSeqlens,
    enable_ring: bool = True,
    process_group: GroupLike = None,
) -> Tensor:
    """``l *, e^ -> l *``

    The inverse of :func:`wrap_maybe_shuffle`, with the same arguments.
    """
    return _shuffled(hidden_states, cu_seqlens, enable_ring, process_group, back=True)


def _shuffled(
    x: Tensor, cu_seqlens: CuSeqlens, enable_ring: bool, group: GroupLike, *, back: bool
) -> Tensor:
    title = UNSHUFFLE if back else SHUFFLE
    if not enable_ring:
        return x

    def check() -> Tensor:
        cu = as_tensor(title, "cu_seqlens", cu_seqlens)
        if not torch.compiler.is_compiling():
            _exchange(x, cu, back, group_comm(group))
        return cu

    def facts(cu: Tensor) -> dict[str, str]:
        return {
            "cu_seqlens": str(on_host(cu).tolist()),
            "dtype": str(x.dtype).removeprefix("torch."),
            "other dims": " ".join(["*", *map(str, x.shape[1:])]),
        }

    cu = checked(title, group, check, facts)
    return shuffle_documents(x, cu, back, group_name(group))
