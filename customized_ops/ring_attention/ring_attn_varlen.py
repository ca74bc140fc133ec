"""Ring attention over packed documents of any lengths, cut anywhere across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .op import CuSeqlens, PackedSequence, SharedOptions, attend, attention_function, declare
from .op.documentation import flash_annotation

RING_ATTN_VARLEN = declare(
    PackedSequence, "seqshard::ring_attn_varlen", "wrap_ring_attn_varlen_func"
)


@attention_function
def wrap_ring_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    deterministic: bool = False,
    return_attn_probs: bool = False,
    enable_ring: bool = True,
    use_cute: bool = False,
    process_group: GroupLike = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    k_layout: Layout | None = None,
    team_size: int | None = None,
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``l (g n) hd^, l g hd^, l g vd^, e^, e^ -> l (g n) vd^``

    Attention inside packed documents whose tokens are cut contiguously across the ranks of a group.
    A cut may fall anywhere in a document. With no group, over the tokens given.

        cu_seqlens = [0, 3, 8]    rank 0: a a a b    rank 1: b b b b
        causal                    rank 1 needs one token of rank 0; document a stays at home

    Returns:
        [l, h, vd] in q's dtype; with ``return_lse`` also [h, l], as :func:`wrap_ring_attn_func`,
        which raises the same errors.

    Communication: as :func:`wrap_ring_attn_func`, but only tokens of documents that cross a cut.

    Gathering k and v of packed sequences: Llama 3 herd of models, arXiv:2407.21783 (2024), 3.3.2.
    """
    scores = alibi_slopes, softmax_scale, dropout_p
    own = *scores, deterministic, return_lse, team_size, k_layout, use_cute
    longest, cu = (max_seqlen_q, max_seqlen_k), (cu_seqlens_q, cu_seqlens_k)
    source = PackedSequence(causal, window_size, 0, enable_ring, longest, *cu)
    return attend(RING_ATTN_VARLEN, q, k, v, source, process_group, own, options, return_attn_probs)


flash_attention_anno = flash_annotation(wrap_ring_attn_varlen_func)
