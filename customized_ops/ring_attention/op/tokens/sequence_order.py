"""Orders of tokens other than that of the sequence, and the ops that bring tokens into them.

    document_order    the order of a batch of packed documents, which an engine gives them before
                      the first layer
    to_order          moves tokens to an order, or back, between layers; where they are cut, over
                      the ranks, each of which receives what it does not hold

Where attention over such tokens is cut, each rank holds a contiguous part of them in their order,
so the layout over the ranks follows from the order.

    causal, 8 tokens, 2 ranks     0 1 6 7 2 3 4 5     ranges:0-2,6-8,2-6
    rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5: as much work as each other, and no row moves
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, Order, PartitionRule, SplitSite

from ...core.arrays import Ints, columns
from ...core.comm.comm_groups import comm_by_name
from ...core.index_table import IndexTable
from ...core.layout import Layout
from ...core.layout import layout_tables as tables
from ...core.mask import AttnMask
from ...core.mask.intervals import members, runs
from ...core.plan.exchanges.between_layouts import relayout
from .call_layouts import BALANCED, by_lengths, layout_by_lengths, layout_when_cut
from .lengths import check_cu_seqlens, check_total, on_host
from .order_ops import UNKNOWN, fetched

DOCUMENT_ORDER, TO_ORDER = "seqshard::document_order", "seqshard::to_order"


def zigzag_order(total: int, parts: int) -> Ints:
    """int64[total]: the tokens of rank after rank. Each has a run from the front and one, as long
    or a token shorter, from the end; together as many tokens as DTensor's ``Shard`` gives it."""
    sizes = np.diff(tables.even_bounds(total, parts))
    ends = sizes // 2
    bounds = np.cumsum([0, *(sizes - ends), *ends[::-1]])
    return _rank_after_rank(tables.front_and_end(bounds[None]))


def _rank_after_rank(table: Ints) -> Ints:
    """int64[tokens]: those of a layout's table."""
    return members(*table[:, 1:].T)


@lru_cache(maxsize=64)
def wanted_order(mask: AttnMask, parts: int) -> Order | None:
    """The order in which contiguous parts are equal work; None where the sequence's own will do."""
    if mask == AttnMask.causal(mask.q_len):
        return _order("zigzag", zigzag_order(mask.q_len, parts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's plan says how even it is
        layout = Layout.balanced(mask, parts)
    if layout == Layout.contiguous(mask.q_len, parts):
        return None
    return _order("balanced", _rank_after_rank(layout.table))


def _order(name: str, tokens: Ints) -> Order:
    return Order(name, tokens, (TO_ORDER, layout_of_order(tokens.tobytes()).spec))


@lru_cache(maxsize=64)
def layout_of_order(tokens: bytes) -> Layout:
    """A layout of one rank, from int64[tokens] in their order."""
    order = np.frombuffer(tokens, dtype=np.int64)
    heads, lasts = runs(np.diff(order) != 1, len(order))
    return Layout(columns(np.zeros_like(heads), order[heads], order[lasts] + 1), 1)


@register_op(
    "e^ -> ?",
    name=DOCUMENT_ORDER,
    title="the order of packed documents",
    differentiable=(),
    fake=lambda cu_seqlens, order, total, outer, inner, back, device: cu_seqlens.new_empty(
        outer * total * inner, dtype=torch.int64, device=device
    ),
)
def document_order(
    cu_seqlens: Tensor, order: str, total: int, outer: int, inner: int, back: bool, device: str
) -> Tensor:
    """What :attr:`~annotations.rules.LateOrder.make` names: the order of a batch's tokens.

    Raises:
        ArgumentError: ``cu_seqlens`` are not the cumulative lengths of ``total`` tokens.
    """
    ends = on_host(cu_seqlens)
    check_cu_seqlens("parallelize", "cu_seqlens", ends)
    check_total("parallelize", "cu_seqlens", ends, total)
    return _indices(ends.tobytes(), order, outer, inner, back).on(
        torch.empty(0, device=device).device
    )


@lru_cache(maxsize=16)
def _indices(ends: bytes, order: str, outer: int, inner: int, back: bool) -> IndexTable:
    ranks = int(order.removeprefix(BALANCED))
    layout = layout_by_lengths(order, np.frombuffer(ends, np.int64), ranks)
    tokens = _rank_after_rank(layout.table)
    return IndexTable(Order(order, tokens).indices(outer, inner, back))


def _annotation(x: Tensor, cu_seqlens: Tensor | None, order: str, dim: int, **_: Any) -> str:
    lead = "".join(f"n{n} " for n in range(dim))
    return f"{lead}l *, {'?' if cu_seqlens is None else 'e^'} -> {lead}l *"


def _cost(
    bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any], itemsize: int
) -> InnerCost:
    """The tokens of the busiest rank that another rank holds in natural order, there and back."""
    lengths = given["cu_seqlens"]
    layout = layout_when_cut(given["order"], site.size, site.parts, lengths)
    bounds = tables.even_bounds(site.size, site.parts)
    held = (layout.positions(rank) for rank in range(site.parts))
    others = [
        ((tokens < start) | (tokens >= stop)).sum()
        for tokens, start, stop in zip(held, bounds[:-1], bounds[1:], strict=True)
    ]
    moved = int(max(others)) * (given["x"].numel() // max(site.size, 1)) * itemsize
    return InnerCost("tokens between orders", moved, moved)


def _backward(grad: Tensor | None, x: Tensor, *how: Any) -> Tensor:
    cu_seqlens, order, dim, back, group, total, _moved = how
    if grad is None:
        return x.new_zeros(x.shape)
    return _brought(grad, cu_seqlens, order, dim, not back, group, total)


@register_op(
    _annotation,
    name=TO_ORDER,
    title="to_order",
    rule=PartitionRule(
        {"l": Communicates(lambda site: {"group": site.group, "total": site.size}, _cost)},
        repeatable=("cu_seqlens",),
    ),
    differentiable=("x",),
    fake=lambda x, **_: x.new_empty(x.shape),
    backward=_backward,
)
def to_order(
    x: Tensor,
    cu_seqlens: Tensor | None,
    order: str,
    dim: int,
    back: bool,
    group: str = "",
    total: int = UNKNOWN,
) -> Tensor:
    """What :attr:`~annotations.rules.Order.move` names: tokens move from natural order to another
    or, with ``back``, from there.

    Args:
        order: a layout of one rank, or the name of one that is made of ``cu_seqlens``.
        dim: the dim of ``x`` with its tokens, of which ranks hold contiguous parts.
        total: tokens over all ranks where an engine has cut them.
    Raises:
        ArgumentError: ``cu_seqlens`` are not the cumulative lengths of so many tokens.
    """
    return _brought(x, cu_seqlens, order, dim, back, group, total)


def _brought(
    x: Tensor, cu_seqlens: Tensor | None, order: str, dim: int, back: bool, group: str, total: int
) -> Tensor:
    comm, whole = comm_by_name(group), x.shape[dim] if total == UNKNOWN else total
    if by_lengths(order):
        assert cu_seqlens is not None
        ends = on_host(cu_seqlens)
        check_cu_seqlens("parallelize", "cu_seqlens", ends)
        check_total("parallelize", "cu_seqlens", ends, whole)
    layouts = [
        Layout.contiguous(whole, comm.size),
        layout_when_cut(order, whole, comm.size, cu_seqlens),
    ]
    source, target = reversed(layouts) if back else layouts
    return fetched(relayout(source, target, 0, comm.rank), x, dim, comm)
