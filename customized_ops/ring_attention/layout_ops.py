"""Ops that move tokens between layouts: shuffle and unshuffle, shard and unshard, roll.

A model runs in a layout if its tokens are shuffled once at its inputs and unshuffled once at its
end; in between only attention and position ids are told the layout. On one rank these ops are the
identity (roll apart), so a model that calls them is still a single-device model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from annotations import register_op
from annotations.binding import BoundAnnotation
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite

from .arguments import ArgumentError, checked
from .core.comm import Comm, Dims, add
from .core.exchange import Exchange
from .core.groups import GroupLike, comm_by_name, group_name
from .core.layout import Layout
from .core.relayout import gather, relayout

WHOLE = "whole"  # as a spec: every rank holds all tokens


def _annotation(x: Tensor, source: str, target: str, dim: int, **_: Any) -> str:
    if WHOLE in (source, target) or not _same_sizes(source, target):
        return "? -> ?"
    lead = " ".join(f"n{i}" for i in range(dim))
    return f"{lead} l * -> {lead} l *".strip()


def _same_sizes(source: str, target: str) -> bool:
    """Whether every rank holds as many tokens before as after; specs without sizes do."""
    if ":" not in source or ":" not in target:
        return True
    return Layout.parse(source).sizes == Layout.parse(target).sizes


def _layouts(x: Tensor, source: str, target: str, dim: int, comm: Comm) -> tuple[Any, Any]:
    """The two layouts; the name of a kind alone stands for it over all ranks' tokens, as many on
    each as here."""
    total = x.shape[dim] * (1 if source == WHOLE else comm.size)

    def parsed(spec: str) -> Layout | None:
        if spec == WHOLE:
            return None
        block = ":1" if spec == "striped" else ""
        return Layout.parse(spec if ":" in spec else f"{spec}:{total}:{comm.size}{block}")

    return parsed(source), parsed(target)


def _exchange(x: Tensor, source: str, target: str, shift: int, dim: int, comm: Comm) -> Exchange:
    before, after = _layouts(x, source, target, dim, comm)
    return gather(before, comm.rank) if after is None else relayout(before, after, shift, comm.rank)


def _backward(
    grad: Tensor | None,
    x: Tensor,
    source: str,
    target: str,
    shift: int,
    dim: int,
    group: str,
    moved: Tensor,
) -> Tensor:
    comm = comm_by_name(group)
    into = x.new_zeros(x.shape)
    if grad is None:
        return into
    if source == WHOLE:
        _, after = _layouts(x, source, target, dim, comm)
        (whole,) = comm.fetch(gather(after, comm.rank), [grad], [Dims(dim, dim)]).wait()
        return whole
    exchange = _exchange(x, source, target, shift, dim, comm)
    comm.send_home(exchange, [grad], [into], [Dims(dim, dim)], add).wait()
    return into


def _fake(x: Tensor, source: str, target: str, shift: int, dim: int, group: str) -> Tensor:
    if WHOLE not in (source, target) and _same_sizes(source, target):
        return x.new_empty(x.shape)
    comm = comm_by_name(group)
    before, after = _layouts(x, source, target, dim, comm)
    shape = list(x.shape)
    if after is None:
        shape[dim] = before.total
    else:
        shape[dim] = after.sizes[comm.rank]
    return x.new_empty(shape)


def _arguments(site: SplitSite) -> dict[str, Any]:
    return {"group": site.group}


def _cost(
    bound: BoundAnnotation, site: SplitSite, given: Mapping[str, Any], itemsize: int
) -> InnerCost:
    """All of a rank's tokens, at worst."""
    shape = bound.input_shapes[0]
    assert shape is not None
    each = -(-torch.Size(shape).numel() // site.parts) * itemsize
    return InnerCost(what="tokens to their layout", forward_bytes=each, backward_bytes=each)


MOVES_TOKENS = PartitionRule({"l": Communicates(_arguments, _cost)})


@register_op(
    _annotation,
    name="seqshard::move_tokens",
    title="move_tokens",
    rule=MOVES_TOKENS,
    fake=_fake,
    backward=_backward,
)
def move_tokens(x: Tensor, source: str, target: str, shift: int, dim: int, group: str) -> Tensor:
    """The op in a graph: tokens of ``x`` from layout ``source`` to ``target``."""
    comm = comm_by_name(group)
    if source == WHOLE:
        return _layouts(x, source, target, dim, comm)[1].shard(x, comm.rank, dim).contiguous()
    exchange = _exchange(x, source, target, shift, dim, comm)
    (moved,) = comm.fetch(exchange, [x], [Dims(dim, dim)]).wait()
    return moved


def wrap_shuffle_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """``b l * -> b l *``

    Tokens from contiguous shards to a layout, across the ranks of a group.

        zigzag, tokens 0..7     rank 0: 0 1 2 3 -> 0 1 6 7     rank 1: 4 5 6 7 -> 2 3 4 5

    Args:
        x: this rank's tokens along dim ``dim``; any dtype.
        layout: where tokens go: a Layout, or a kind (``"zigzag"``, ``"striped"``) for as many
            tokens on every rank, which an engine fills in with the sizes.
        process_group: a ProcessGroup, its global ranks in increasing order, or None (one rank: the
            identity). Leave it None under an auto-parallelizer, which fills it in.
        dim: the dim of tokens, not negative.
    Returns:
        this rank's tokens of the layout, in its order.

    The backward moves gradients the way back.

    Raises:
        ValueError: the layout does not fit the group or x.
    """
    return _moved("wrap_shuffle_func", x, "contiguous", layout, 0, process_group, dim)


def wrap_unshuffle_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """``b l * -> b l *``

    Tokens from a layout back to contiguous shards; the inverse of :func:`wrap_shuffle_func`, with
    the same arguments.
    """
    return _moved("wrap_unshuffle_func", x, layout, "contiguous", 0, process_group, dim)


def wrap_shard_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """This rank's tokens of a tensor that every rank holds whole; nothing moves.

    Args:
        x: the whole tensor, the same on every rank. layout, process_group, dim: as
            :func:`wrap_shuffle_func`.

    The gradient of x is that of this rank's tokens, added up over the group, so the same on every
    rank.
    """
    return _moved("wrap_shard_func", x, WHOLE, layout, 0, process_group, dim)


def wrap_unshard_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """The whole tensor, in order, on every rank; the inverse of :func:`wrap_shard_func`.

    The gradient of x is added up over the ranks: each may use the whole tensor in its own way. If
    all ranks compute the same loss from it, divide that by the number of ranks.
    """
    return _moved("wrap_unshard_func", x, layout, WHOLE, 0, process_group, dim)


def wrap_roll_func(
    x: Tensor,
    shifts: int,
    layout: Layout | str = "contiguous",
    process_group: GroupLike = None,
    dim: int = 1,
) -> Tensor:
    """``b l * -> b l *``

    ``torch.roll`` along a sequence that lies in a layout: token i of the result is token i - shifts
    of x, modulo the length. Labels of multi-token prediction are ``shifts=-n``; only tokens whose
    new place is another rank's move.

        shifts -1, contiguous     rank 0: 0 1 2 3 -> 1 2 3 4     rank 1: 4 5 6 7 -> 5 6 7 0

    Args:
        x: this rank's tokens along dim ``dim``; any dtype. shifts: tokens, of any sign.
        layout, process_group, dim: as :func:`wrap_shuffle_func`.
    """
    return _moved("wrap_roll_func", x, layout, layout, shifts, process_group, dim)


def _moved(
    title: str,
    x: Tensor,
    source: Layout | str,
    target: Layout | str,
    shift: int,
    process_group: GroupLike,
    dim: int,
) -> Tensor:
    def check() -> tuple[str, str]:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{title}: x must be a tensor, got {type(x).__name__}")
        if not isinstance(shift, int):
            raise ArgumentError(f"{title}: shifts must be an integer, got {shift!r}")
        if not 0 <= dim < x.ndim:
            raise ArgumentError(f"{title}: dim must be 0 .. {x.ndim - 1}, got {dim}")
        sides = {"source": source, "target": target}
        # Contiguous shards beside a layout of known length are that length's.
        known = next((s for s in sides.values() if isinstance(s, Layout)), None)
        specs = []
        for side in sides.values():
            if not isinstance(side, Layout | str):
                raise ArgumentError(
                    f"{title}: layout must be a Layout or the name of a kind, got {side!r}"
                )
            if side == "contiguous" and known is not None:
                side = f"contiguous:{known.total}:{known.group_size}"
            specs.append(side.spec if isinstance(side, Layout) else side)
        if not torch.compiler.is_compiling():
            _check(title, x, specs[0], specs[1], dim, comm_by_name(group_name(process_group)))
        return specs[0], specs[1]

    def facts(specs: tuple[str, str]) -> dict[str, str]:
        return {"from": specs[0], "to": specs[1], "shifts": str(shift), "dim": str(dim)}

    specs = checked(title, process_group, check, facts)
    return move_tokens(x, *specs, shift, dim, group_name(process_group))


def _check(title: str, x: Tensor, source: str, target: str, dim: int, comm: Comm) -> None:
    before, after = _layouts(x, source, target, dim, comm)
    for layout in (before, after):
        if layout is not None and layout.group_size != comm.size:
            raise ArgumentError(
                f"{title}: layout {layout} is for {layout.group_size} ranks, but the group has "
                f"{comm.size}"
            )
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
