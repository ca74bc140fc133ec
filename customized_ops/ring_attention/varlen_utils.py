"""Shuffling packed documents, under the names of nnscaler's ``varlen_utils``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .core.comm.comm_groups import GroupLike, group_comm
from .core.layout import Layout
from .layout_ops import wrap_shuffle_func, wrap_unshuffle_func
from .op.arguments import ArgumentError, checked
from .op.tokens.lengths import CuSeqlens, as_tensor, check_cu_seqlens, on_host


def shuffle_varlen(
    t: Tensor, cu_seqlens_padded: CuSeqlens, cp_ranks: Sequence[int], cp_group: GroupLike
) -> Tensor:
    """``l * -> l *``

    Move packed tokens from contiguous shards to ``Layout.zigzag(total, group_size, cu_seqlens)``,
    like nnscaler's function of that name, for documents of any length.

    Args:
        t: [l, ...], this rank's tokens.
        cu_seqlens_padded: cumulative lengths of the whole packed sequence, the same on every rank.
        cp_ranks: global ranks of the group, in increasing order.
        cp_group: the group, or None to have it made from ``cp_ranks``.
    Returns:
        this rank's tokens in the layout: document by document, the front chunk first. Ranks may
        hold different counts where lengths are not multiples of 2 * group_size.
    Raises:
        ValueError: ``cu_seqlens_padded``, ``t`` and the group do not fit; says what would.
    """
    layout, group = _zigzag("shuffle_varlen", cu_seqlens_padded, cp_ranks, cp_group)
    return wrap_shuffle_func(t, layout, group, dim=0)


def unshuffle_varlen(
    t: Tensor, cu_seqlens_padded: CuSeqlens, cp_ranks: Sequence[int], cp_group: GroupLike
) -> Tensor:
    """The inverse of :func:`shuffle_varlen`, with the same arguments."""
    layout, group = _zigzag("unshuffle_varlen", cu_seqlens_padded, cp_ranks, cp_group)
    return wrap_unshuffle_func(t, layout, group, dim=0)


def _zigzag(
    title: str, cu_seqlens: CuSeqlens, ranks: Sequence[int], group: GroupLike
) -> tuple[Layout, GroupLike]:
    group = list(ranks) if group is None else group
    size = group_comm(group).size

    def check() -> Layout:
        values = on_host(as_tensor(title, "cu_seqlens_padded", cu_seqlens))
        check_cu_seqlens(title, "cu_seqlens_padded", values)
        if len(ranks) != size:
            raise ArgumentError(
                f"{title}: cp_ranks are {list(ranks)}, but cp_group has {size} ranks"
            )
        return Layout.zigzag(int(values[-1]), size, values)

    return checked(title, group, check), group
