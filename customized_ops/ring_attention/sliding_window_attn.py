"""Sliding-window attention: only the halo moves, however many ranks a window spans."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .op.arguments import ring_group
from .op.cu_seqlens import CuSeqlens
from .op.documentation import attention_function
from .op.eager import attend
from .op.graph import declare
from .op.mask_source import Documents, MaskSource, OneSequence
from .op.options import SharedOptions

TITLE = "wrap_sliding_window_attn_func"
# Rows stay with their holder: giving some away would move more than the halo.
SLIDING_WINDOW_ATTN = declare(
    OneSequence, "seqshard::sliding_window_attn", TITLE, assignment="owner", split_heads=False
)
SLIDING_WINDOW_ATTN_VARLEN = declare(
    Documents, "seqshard::sliding_window_attn_varlen", TITLE, assignment="owner", split_heads=False
)


@attention_function
def wrap_sliding_window_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    deterministic: bool = False,
    return_attn_probs: bool = False,
    enable_ring: bool = True,
    use_cute: bool = False,
    process_group: GroupLike = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``, or packed, with ``cu_seqlens``,
    ``l (g n) hd^, l g hd^, l g vd^, e^, e^ -> l (g n) vd^``

    Sliding-window attention over tokens that are cut contiguously across the ranks of a group; with
    no group, over the tokens given. A rank receives the keys that its window reaches beyond its own
    tokens, from as many ranks as hold some, and nothing else moves.

        window_size (2, 0)    rank 0: tokens 0 1 2 3     rank 1: tokens 4 5 6 7
                              receives nothing           receives keys 2 3

    Args:
        q: [b, l, h, hd], this rank's tokens; [l, h, hd] with ``cu_seqlens``. Any strides.
        k, v: [b, l, g, hd] and [b, l, g, vd], or packed without b; h is a multiple of g.
        cu_seqlens_q, cu_seqlens_k: [documents + 1], int32 or int64, cumulative lengths of the whole
            packed sequence, the same on every rank; windows end at documents' ends.
    Returns:
        As :func:`wrap_ring_attn_func`, or packed; it raises the same errors.

    Communication: with contiguous shards, even or uneven, the forward receives at most left + right
    tokens of k and v; in another layout, what the windows of its pieces reach. The backward
    receives the same, and sends as many of dk and dv home.

    Beltagy, Peters, Cohan: Longformer, arXiv:2004.05150 (2020).
    """
    source: MaskSource
    op, longest = SLIDING_WINDOW_ATTN, (max_seqlen_q, max_seqlen_k)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        source = OneSequence(causal, window_size, 0, enable_ring, longest)
    else:
        op, cu = SLIDING_WINDOW_ATTN_VARLEN, (cu_seqlens_q, cu_seqlens_k)
        source = Documents(*cu, causal, window_size, 0, enable_ring, longest)
    return attend(
        op,
        q,
        k,
        v,
        source,
        ring_group(enable_ring, process_group),
        options,
        return_attn_probs,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=return_lse,
        use_cute=use_cute,
    )
