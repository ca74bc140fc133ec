"""Moves tokens from one layout to another over the ranks: the op of :mod:`...layout_ops`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, Reorders, SplitSite

from ...core.comm import Comm
from ...core.comm.comm_groups import comm_by_name
from ...core.comm.transfer_side import Dims, add
from ...core.layout import Layout
from ...core.layout.layout_arguments import shorten
from ...core.plan.exchanges.between_layouts import gather, relayout
from ...core.plan.exchanges.exchange import Exchange
from ..arguments import ArgumentError
from .call_layouts import layout_named

WHOLE = "whole"  # as a spec: every rank holds all tokens
UNKNOWN = -1  # as a total: no engine has cut the sequence


def _annotation(
    x: Tensor, source: str, target: str, dim: int, group: str, total: int = UNKNOWN, **_: Any
) -> str:
    if not _same_shape(source, target, group, total):
        return "? -> ?"
    lead = " ".join(f"n{i}" for i in range(dim))
    return f"{lead} l * -> {lead} l *".strip()


def _is_cut(group: str, total: int) -> bool:
    """Whether "whole" stands for contiguous shards: those that an engine cut, or the only one of a
    single rank. With a group of the user's own it is the whole."""
    return total != UNKNOWN or group == ""


def _same_shape(source: str, target: str, group: str, total: int) -> bool:
    """Whether every rank holds as many tokens before as after; so it is for specs without sizes."""
    whole = WHOLE in (source, target)
    if whole and not _is_cut(group, total):
        return False
    known = [Layout.parse(spec) for spec in (source, target) if ":" in spec]
    if whole:
        known += [Layout.contiguous(each.total, each.group_size) for each in known]
    return len({layout.sizes for layout in known}) < 2


def _layouts(
    x: Tensor, source: str, target: str, dim: int, comm: Comm, total: int
) -> tuple[Any, Any]:
    """The two layouts, None for all tokens on every rank.

    The name of a kind alone stands for that layout of ``total`` tokens or, if that is UNKNOWN, of
    as many tokens on each rank as here.
    """
    cut = _is_cut(comm.name, total)
    if total == UNKNOWN:
        total = x.shape[dim] * (1 if source == WHOLE else comm.size)

    def parsed(spec: str) -> Layout | None:
        if spec == WHOLE:
            return Layout.contiguous(total, comm.size) if cut else None
        return layout_named(spec, total, comm.size)

    return parsed(source), parsed(target)


def fetched(exchange: Exchange, x: Tensor, dim: int, comm: Comm) -> Tensor:
    """The tokens that an exchange brings here."""
    with comm.doing("a change of layout, forward"):
        (moved,) = comm.fetch(exchange, [x], [Dims(dim, dim)]).wait()
    return moved


def sent_home(exchange: Exchange, grad: Tensor, x: Tensor, dim: int, comm: Comm) -> Tensor:
    """The gradient of ``x`` from that of :func:`fetched`."""
    with comm.doing("a change of layout, backward"):
        into = x.new_zeros(x.shape)
        comm.send_home(exchange, [grad], [into], [Dims(dim, dim)], add).wait()
    return into


def _exchange(before: Layout, after: Layout | None, shift: int, comm: Comm) -> Exchange:
    return gather(before, comm.rank) if after is None else relayout(before, after, shift, comm.rank)


def _backward(grad: Tensor | None, x: Tensor, *how: Any) -> Tensor:
    source, target, shift, dim, group, total, _moved = how
    comm = comm_by_name(group)
    if grad is None:
        return x.new_zeros(x.shape)
    before, after = _layouts(x, source, target, dim, comm, total)
    if before is None:
        return fetched(gather(after, comm.rank), grad, dim, comm)
    return sent_home(_exchange(before, after, shift, comm), grad, x, dim, comm)


def _fake(
    x: Tensor, source: str, target: str, shift: int, dim: int, group: str, total: int
) -> Tensor:
    if _same_shape(source, target, group, total):
        return x.new_empty(x.shape)
    comm = comm_by_name(group)
    before, after = _layouts(x, source, target, dim, comm, total)
    shape = list(x.shape)
    shape[dim] = before.total if after is None else after.sizes[comm.rank]
    return x.new_empty(shape)


def _cost(
    bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any], itemsize: int
) -> InnerCost:
    """The cost at worst: all of a rank's tokens move."""
    shape = bound.input_shapes[0]
    assert shape is not None
    each = -(-torch.Size(shape).numel() // site.parts) * itemsize
    return InnerCost(what="tokens to their layout", forward_bytes=each, backward_bytes=each)


def _orders(given: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The orders before and after; None is natural order: contiguous shards, the whole, and all
    calls with a group of their own."""

    def order(spec: str) -> str | None:
        return None if spec == WHOLE or spec.startswith("contiguous") or given["group"] else spec

    return order(given["source"]), order(given["target"])


MOVES_TOKENS = PartitionRule(
    {"l": Communicates(lambda site: {"group": site.group, "total": site.size}, _cost)},
    reorders=Reorders("l", _orders, natural={"source": "contiguous", "target": "contiguous"}),
)


@register_op(
    _annotation,
    name="seqshard::move_tokens",
    title="move_tokens",
    rule=MOVES_TOKENS,
    fake=_fake,
    backward=_backward,
)
def move_tokens(
    x: Tensor, source: str, target: str, shift: int, dim: int, group: str, total: int = UNKNOWN
) -> Tensor:
    """The op in a graph: tokens of ``x`` from layout ``source`` to ``target``.

    Args:
        total: tokens over all ranks where an engine has cut the sequence into contiguous shards.
    """
    comm = comm_by_name(group)
    before, after = check_move("move_tokens", x, source, target, dim, comm, total)
    if before is None:
        return after.shard(x, comm.rank, dim).contiguous()
    return fetched(_exchange(before, after, shift, comm), x, dim, comm)


def check_move(
    title: str, x: Tensor, source: str, target: str, dim: int, comm: Comm, total: int = UNKNOWN
) -> tuple[Any, Any]:
    """The two layouts, see :func:`_layouts`. Refuses what cannot be moved; what an engine cut, on
    every rank or on none."""
    before, after = _layouts(x, source, target, dim, comm, total)
    known = [layout for layout in (before, after) if layout is not None]
    for layout in known:
        if layout.group_size != comm.size:
            raise ArgumentError(
                f"{title}: layout {layout} is for {layout.group_size} ranks, but the group has "
                f"{comm.size}"
            )
    if total != UNKNOWN:
        _check_shards(title, source, target, known, Layout.contiguous(total, comm.size))
    by_name = WHOLE not in (source, target) and ":" not in source + target
    if by_name and before.sizes != after.sizes:
        raise ArgumentError(
            f"{title}: {target!r} of {after.total} tokens gives the ranks {list(after.sizes)} "
            f"tokens instead of {list(before.sizes)}; say so with a Layout instead of its name"
        )
    held = after.total if before is None else before.sizes[comm.rank]
    if x.shape[dim] != held:
        raise ArgumentError(
            f"{title}: dim {dim} of {tuple(x.shape)} should be the {held} tokens that rank "
            f"{comm.rank} of {comm.size} holds in layout {after if before is None else before}"
        )
    return before, after


def _check_shards(title: str, source: str, target: str, known: list[Layout], cut: Layout) -> None:
    """Every rank must hold as many tokens, before and after, as the engine gave it."""
    for layout in known:
        if layout.sizes != cut.sizes:
            raise ArgumentError(
                f"{title}: from {shorten(source)!r} to {shorten(target)!r}: layout {layout} gives "
                f"the ranks {list(layout.sizes)} tokens, but {cut.total} tokens are cut into "
                f"{list(cut.sizes)}; pad the sequence to a multiple of {2 * cut.group_size}"
            )
