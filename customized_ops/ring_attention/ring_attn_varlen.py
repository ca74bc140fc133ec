"""Ring attention over packed documents of any lengths, cut anywhere across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .op.arguments import ring_group
from .op.cu_seqlens import CuSeqlens
from .op.documentation import attention_function
from .op.eager import attend
from .op.graph import declare
from .op.mask_source import Documents
from .op.options import SharedOptions

RING_ATTN_VARLEN = declare(Documents, "seqshard::ring_attn_varlen", "wrap_ring_attn_varlen_func")


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

    Attention inside packed documents whose tokens are cut contiguously across the ranks of a group,
    documents anywhere; with no group, over the tokens given.

        cu_seqlens = [0, 3, 8]    rank 0: a a a b    rank 1: b b b b
        causal                    rank 1 needs one token of rank 0; document a stays at home

    Args:
        q: [l, h, hd], this rank's tokens; any strides.
        k, v: [l, g, hd] and [l, g, vd]; h is a multiple of g (grouped queries).
        cu_seqlens_q, cu_seqlens_k: [documents + 1], int32 or int64, of the whole sequence, the same
            on every rank: start at 0, never fall (a document may be empty), end at the total over
            all ranks. Lists and CPU tensors cost no sync; a tensor on a device one for each batch.
        alibi_slopes: [h] or [1, h]: what a score loses per token of distance; the ends of a
            document are aligned where its lengths in q and k differ. No gradient.
        causal: a token attends its document up to itself; aligned at the documents' ends where
            their lengths in q and k differ.
        enable_ring: False computes on this rank alone, whatever ``process_group`` says; not inside
            a captured graph, where an engine would give the op its group again.
        layout: which tokens of q each rank holds; None means
            ``Layout.contiguous(total, group_size)``. It is that of k and v too where they have the
            same total and ``k_layout`` is None.
    Returns:
        [l, h, vd] in q's dtype; with ``return_lse`` also [h, l], as :func:`wrap_ring_attn_func`,
        which raises the same errors.

    Communication: as :func:`wrap_ring_attn_func`, and only tokens of documents that cross a cut.

    Gathering k and v of packed sequences: Llama 3 herd of models, arXiv:2407.21783 (2024), 3.3.2.
    """
    longest = max_seqlen_q, max_seqlen_k
    return attend(
        RING_ATTN_VARLEN,
        q,
        k,
        v,
        Documents(cu_seqlens_q, cu_seqlens_k, causal, window_size, 0, enable_ring, longest),
        ring_group(enable_ring, process_group),
        options,
        return_attn_probs,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=return_lse,
        k_layout=k_layout,
        use_cute=use_cute,
        team_size=team_size,
    )
