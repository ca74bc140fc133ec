"""Ops that move tokens between layouts: shuffle and unshuffle, shard and unshard, roll.

A model runs in a layout if its tokens are shuffled once at its inputs and unshuffled once at its
end; in between only attention and position ids need the layout. On one rank these ops are the
identity (except roll), so a model that calls them is still a single-device model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core.comm.comm_groups import GroupLike, group_comm, group_name
from .core.layout import Layout
from .op.arguments import ArgumentError, checked, require
from .op.tokens.order_ops import WHOLE, check_move, move_tokens


def wrap_shuffle_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """``b l * -> b l *``

    Move tokens from contiguous shards to a layout, across the ranks of a group.

        zigzag, tokens 0..7     rank 0: 0 1 2 3 -> 0 1 6 7     rank 1: 4 5 6 7 -> 2 3 4 5

    Args:
        x: this rank's tokens along dim ``dim``; any dtype.
        layout: where tokens go: a Layout, or a kind (``"zigzag"``, ``"striped"``), which stands for
            the same number of tokens on every rank, or for the tokens that an engine cut into
            contiguous shards.
        process_group: a ProcessGroup, its global ranks in increasing order, or None (one rank: the
            identity). Leave it None under an auto-parallelizer, which fills it in.
        dim: the dim of tokens, not negative.
    Returns:
        this rank's tokens in the layout, in the layout's order.

    The backward moves the gradients back.

    Raises:
        ValueError: the layout does not fit the group or x.
    """
    return _moved("wrap_shuffle_func", x, "contiguous", layout, 0, process_group, dim)


def wrap_unshuffle_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """``b l * -> b l *``

    Move tokens from a layout back to contiguous shards; the inverse of :func:`wrap_shuffle_func`,
    with the same arguments.
    """
    return _moved("wrap_unshuffle_func", x, layout, "contiguous", 0, process_group, dim)


def wrap_shard_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """``b l * -> b l *``

    Take this rank's tokens of a tensor that every rank holds whole; nothing moves.

    In a single-device program this is the identity. An auto-parallelizer that cuts the sequence
    replaces it by :func:`wrap_shuffle_func`, from the contiguous shards that it cut.

    Args:
        x: the whole tensor, the same on every rank. layout, process_group, dim: as
            :func:`wrap_shuffle_func`.

    The gradient of x is the gradient of each rank's tokens, added up over the group, so it is the
    same on every rank.
    """
    return _moved("wrap_shard_func", x, WHOLE, layout, 0, process_group, dim)


def wrap_unshard_func(
    x: Tensor, layout: Layout | str, process_group: GroupLike = None, dim: int = 1
) -> Tensor:
    """``b l * -> b l *``

    Gather the whole tensor, in order, on every rank; the inverse of :func:`wrap_shard_func`. An
    auto-parallelizer replaces it by :func:`wrap_unshuffle_func`.

    The gradient of x is added up over the ranks, because each may use the whole tensor in its own
    way. If all ranks compute the same loss from it, divide the loss by the number of ranks.
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
    of x, modulo the length. ``shifts=-n`` gives the labels of multi-token prediction. Only tokens
    whose new place is on another rank move.

        shifts -1, contiguous     rank 0: 0 1 2 3 -> 1 2 3 4     rank 1: 4 5 6 7 -> 5 6 7 0

    Args:
        x: this rank's tokens along dim ``dim``; any dtype. shifts: a number of tokens, of any sign.
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
        require(isinstance(shift, int), title, "shifts", "an integer", shift)
        require(0 <= dim < x.ndim, title, "dim", f"0 .. {x.ndim - 1}", dim)
        # Where the other side is a Layout, contiguous shards have its total and number of ranks.
        known = next((s for s in (source, target) if isinstance(s, Layout)), None)
        specs = []
        for side in (source, target):
            fits = isinstance(side, Layout | str)
            require(fits, title, "layout", "a Layout or the name of a kind", side)
            if side == "contiguous" and known is not None:
                side = f"contiguous:{known.total}:{known.group_size}"
            specs.append(side.spec if isinstance(side, Layout) else side)
        if not torch.compiler.is_compiling():
            check_move(title, x, specs[0], specs[1], dim, group_comm(process_group))
        return specs[0], specs[1]

    def facts(specs: tuple[str, str]) -> dict[str, str]:
        others = [str(size) for size in x.shape]
        others[dim] = "*"
        by_name = any(":" not in spec and spec != WHOLE for spec in specs)
        return {
            "from": specs[0],
            "to": specs[1],
            "shifts": str(shift),
            "dim": str(dim),
            "dtype": str(x.dtype).removeprefix("torch."),
            "other dims": " ".join(others),
            **({"tokens": str(x.shape[dim])} if by_name else {}),
        }

    specs = checked(title, process_group, check, facts)
    return move_tokens(x, *specs, shift, dim, group_name(process_group))
