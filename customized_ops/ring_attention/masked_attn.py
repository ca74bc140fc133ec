"""Attention under any mask: the op that takes an :class:`AttnMask`."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .core.mask import AttnMask
from .op import Masked, SharedOptions, attend, attention_function, declare

MASKED_ATTN = declare(Masked, "seqshard::masked_attn", "wrap_masked_attn_func")


@attention_function
def wrap_masked_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttnMask,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    process_group: GroupLike = None,
    *,
    return_lse: bool = False,
    k_layout: Layout | None = None,
    team_size: int | None = None,
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``

    Attention under any mask, over sequences cut across the ranks of a group; with no group, over
    the tokens given. q and k may have different lengths and different layouts.

        AttnMask.prefix_lm(6, 2)      rank 0: tokens 0 1 2     rank 1: tokens 3 4 5
        x x . . . .
        x x . . . .                   each rank gets the keys that its rows attend, or sends its
        x x x . . .                   rows to the keys where that moves fewer bytes, and ranks with
        x x x x . .                   too much work give some away
        x x x x x .
        x x x x x x

    Args:
        k, v: [b, m, g, hd] and [b, m, g, vd]; h is a multiple of g (grouped queries).
        mask: which pairs of the whole sequences attend, the same on every rank.
        alibi_slopes: [h] or [b, h]: what a score loses per token of distance; the ends of q and k
            are aligned where their lengths differ. No gradient.
        layout: which tokens of q each rank holds; None means ``Layout.contiguous``. k and v have
            the same layout where they are as long as q and ``k_layout`` is None.
    Returns:
        As :func:`wrap_ring_attn_func`, which communicates and raises errors the same way.

    Masks as lists of slices: MagiAttention (SandAI, 2025) has four shapes of slice, which are
    special cases of band slices.
    """
    own = (alibi_slopes, softmax_scale, dropout_p, deterministic, return_lse, team_size, k_layout)
    return attend(MASKED_ATTN, q, k, v, Masked(mask), process_group, own, options)
