"""Sliding-window attention: only the halo moves, however many ranks a window spans."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .op import CuSeqlens, SharedOptions, attend, attention_function, declare_both
from .op.documentation import flash_annotation
from .op.window_source import sequence_or_documents

# Rows stay with their holder: giving some away would move more than the halo.
SLIDING_WINDOW_ATTN, SLIDING_WINDOW_ATTN_VARLEN = declare_both(
    "seqshard::sliding_window_attn",
    "wrap_sliding_window_attn_func",
    assignment="owner",
    split_heads=False,
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

    Returns:
        As :func:`wrap_ring_attn_func`, or packed; it raises the same errors.
    Communication: with contiguous shards the forward receives at most left + right tokens of k and
    v. The backward receives the same, and sends as many tokens of dk and dv home.

    Beltagy, Peters, Cohan: Longformer, arXiv:2004.05150 (2020).
    """
    own = (alibi_slopes, softmax_scale, dropout_p, deterministic, return_lse, None, None, use_cute)
    longest, cu = (max_seqlen_q, max_seqlen_k), (cu_seqlens_q, cu_seqlens_k)
    source = sequence_or_documents(causal, window_size, 0, enable_ring, longest, *cu)
    op = SLIDING_WINDOW_ATTN_VARLEN if source.packed else SLIDING_WINDOW_ATTN
    return attend(op, q, k, v, source, process_group, own, options, return_attn_probs)


flash_attention_anno = flash_annotation(wrap_sliding_window_attn_func)
