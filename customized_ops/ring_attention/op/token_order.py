"""Attention over tokens that an engine has put in another order, once, before the first layer.

A whole call is told of the order as a layout of one rank. Where the call is cut, each rank holds a
contiguous part of the tokens in that order, so the layout over the ranks follows.

    causal, 8 tokens, 2 ranks     0 1 6 7 2 3 4 5     ranges:0-2,6-8,2-6
    rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5: as much work as each other, and no row moves
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Follow, LateOrder, Order, Orders, SplitSite

from ..core.arrays import Ints
from ..core.index_table import IndexTable
from ..core.layout import Layout
from ..core.layout import layout_tables as tables
from ..core.mask import AttnMask
from .arguments import ArgumentError
from .cu_seqlens import check_cu_seqlens, check_total, on_host
from .mask_source import Arguments, MaskSource, has_data
from .shard_layout import (
    BALANCED,
    BY_DOCUMENT,
    by_lengths,
    contiguous_parts,
    layout_by_lengths,
    layout_named,
)

DOCUMENT_ORDER = "seqshard::document_order"


def layout_at(site: SplitSite, given: Arguments) -> Layout:
    """Where tokens of a call that is cut lie: contiguous parts of the order that it was told."""
    if not given["layout"]:
        return Layout.contiguous(site.size, site.parts)
    if by_lengths(given["layout"]):
        cu = given["cu_seqlens_q"]
        if not has_data(cu):  # as of one document
            return Layout.zigzag(site.size, site.parts)
        return layout_by_lengths(given["layout"], on_host(cu), site.parts)
    return _cut(given["layout"], site.size, site.parts)


@lru_cache(maxsize=64)
def _cut(spec: str, total: int, parts: int) -> Layout:
    """The layout itself if it is for so many parts; of one for one rank, parts of its order as
    DTensor's ``Shard`` cuts."""
    order = layout_named(spec, total, parts)
    if order.group_size not in (1, parts) or order.total != total:
        raise ArgumentError(
            f"layout {order} is of {order.total} tokens over {order.group_size} ranks, but the "
            f"engine cuts {total} tokens over {parts}"
        )
    if order.group_size == parts:
        return order
    layout = contiguous_parts(order, parts)
    zigzag = Layout.zigzag(total, parts)
    return zigzag if layout == zigzag else layout


def zigzag_order(total: int, parts: int) -> Ints:
    """int64[total]: the tokens of rank after rank, each with a run from the front and one, as long
    or a token shorter, from the end; in all as many as DTensor's ``Shard`` gives it."""
    sizes = np.diff(tables.even_bounds(total, parts))
    ends = sizes // 2
    front = np.concatenate([[0], np.cumsum(sizes - ends)])
    back = total - np.concatenate([[0], np.cumsum(ends)])
    runs = [
        np.r_[front[r] : front[r + 1], back[r + 1] : back[r]].astype(np.int64) for r in range(parts)
    ]
    return np.concatenate(runs)


@lru_cache(maxsize=64)
def _wanted(mask: AttnMask, parts: int) -> Order | None:
    if mask == AttnMask.causal(mask.q_len):
        return Order("zigzag", zigzag_order(mask.q_len, parts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it comes to is in the engine's plan
        layout = Layout.balanced(mask, parts)
    if layout == Layout.contiguous(mask.q_len, parts):
        return None
    return Order("balanced", np.concatenate([layout.positions(r) for r in range(parts)]))


def orders_of(source: type[MaskSource]) -> Mapping[str, Orders]:
    """What the partition rule of an attention op says about orders of its tokens."""

    def wanted(
        bound: BoundAnnotation, site: SplitSite, given: Arguments
    ) -> Order | LateOrder | None:
        if not all(has_data(given[name]) for name in source.lengths):
            name = f"{BALANCED}{site.parts}"
            return LateOrder(name, site.size, source.lengths[0], DOCUMENT_ORDER)
        mask = source.decode(given).mask(site.size, site.size)
        return None if mask is None or not mask.area else _wanted(mask, site.parts)

    def told(given: Arguments, order: Order) -> dict[str, Any] | None:
        if given["group"] or given["layout"] or given["k_layout"] or given["row_parts"]:
            return None
        return {"layout": _one_rank(order.tokens.tobytes()).spec}

    def cut(site: SplitSite, given: Arguments) -> dict[str, Any]:
        layout = given["layout"]
        return {"layout": layout if by_lengths(layout) else layout_at(site, given).spec}

    def follow(name: str, given: Arguments, whole_keys: bool = False) -> Follow | str:
        packed = {"cu_seqlens_q", "cu_seqlens_k"} <= source.tensors.keys()
        if by_lengths(name) and not packed:
            return "only attention over packed documents (cu_seqlens) takes that order"
        if name != BY_DOCUMENT and whole_keys:
            return "a call of which only rows are cut takes no layout"
        if whole_keys and given.get("alibi_slopes") is not None:
            return "alibi_slopes do not go with rows of a layout, which may lie apart"
        own = [name for name in ("group", "layout", "k_layout", "row_parts") if given.get(name)]
        if whole_keys and given.get("row_parts") == 1:
            own.remove("row_parts")
        if own:
            return f"the call is given a {own[0]} of its own"
        lengths = ("cu_seqlens_q",) if whole_keys else ("cu_seqlens_q", "cu_seqlens_k")
        return Follow({"layout": name}, lengths if by_lengths(name) else ())

    def rows_told(given: Arguments, order: Order) -> dict[str, Any] | None:
        """Where all rows attend all keys, nothing depends on which row is where."""
        q_len, k_len = given["q"].shape[-3], given["k"].shape[-3]
        mask = source.decode(given).mask(q_len, k_len)
        by_place = given["alibi_slopes"] is not None or given["dropout_p"] or given["group"]
        alike = mask is not None and mask.area == q_len * k_len
        return {} if alike and not by_place else None

    of_rows = partial(follow, whole_keys=True)
    return {
        "l": Orders(wanted, told, cut, follow),
        "lq": Orders(lambda *_: None, rows_told, follow=of_rows),
    }


@lru_cache(maxsize=64)
def _one_rank(tokens: bytes) -> Layout:
    order = np.frombuffer(tokens, dtype=np.int64)
    first = np.flatnonzero(np.diff(order, prepend=order[:1] - 2) != 1)
    last = np.append(first[1:], len(order)) - 1
    return Layout(np.stack([0 * first, order[first], order[last] + 1], axis=1), 1)


@register_op(
    lambda total, outer, inner, **_: f"e^ -> {outer * total * inner}",
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
    tokens = np.concatenate([layout.positions(rank) for rank in range(ranks)])
    return IndexTable(Order(order, tokens).indices(outer, inner, back))
