"""Ring attention over packed documents of any lengths, cut anywhere across ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .op.arguments import Options
from .op.attention_op import declare
from .op.packed_attn import PACKED, packed_attention
from .varlen_utils import CuSeqlens

RING_ATTN_VARLEN = declare(PACKED, "seqshard::ring_attn_varlen", "wrap_ring_attn_varlen_func")


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
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    layout: Layout | None = None,
    k_layout: Layout | None = None,
    kernel: str = "auto",
    reduce_dtype: torch.dtype | None = None,
    q_rows: tuple[int, int] | None = None,
    q_heads: tuple[int, int] | None = None,
    team_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``l (g n) hd^, l g hd^, l g vd^, e^, e^ -> l (g n) vd^``

    Attention inside packed documents whose tokens are cut contiguously across the ranks of a group,
    documents anywhere; with no group, over the tokens given.

        cu_seqlens = [0, 3, 8]    rank 0: a a a b    rank 1: b b b b
        causal                    rank 1 needs one token of rank 0; document a stays at home

    Args:
        q: [l, h, hd], this rank's tokens; any strides.
        k: [l, g, hd], v: [l, g, vd]; h is a multiple of g (grouped queries).
        cu_seqlens_q, cu_seqlens_k: [documents + 1], int32 or int64, of the whole sequence, the same
            on every rank: start at 0, never fall (a document may be empty), end at the total over
            all ranks. Lists and CPU tensors cost no sync; see ``varlen_utils``.
        alibi_slopes: [h] or [1, h]: what a score loses per token of distance; the ends of a
            document are aligned where its lengths in q and k differ. No gradient.
        dropout_p: the share of probabilities that become 0, in [0, 1). Which ones is drawn by
            token and head, so it is the same on any number of ranks.
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(hd).
        causal: a token attends its document up to itself; aligned at the documents' ends where
            their lengths in q and k differ.
        window_size: (left, right) tokens around it; -1 is unbounded.
        deterministic: gradients are the same bit for bit from run to run, which costs some kernels
            time; out always is. ``torch.use_deterministic_algorithms(True)`` asks for it too.
        return_attn_probs: only False.
        enable_ring: False computes on this rank alone, whatever ``process_group`` says; not inside
            a captured graph, where an engine would give the op its group again.
        use_cute: True asks for flash-attn-4, as ``kernel="flash4"`` does.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        return_lse: also return the log-sum-exp of the scaled scores; gradients flow through it.
        max_seqlen_q, max_seqlen_k: not needed; checked if given.
        softcap: scores are kept in (-softcap, softcap) by a tanh; 0 is none.
        sink: [h] logits that join the softmax with no value; learnable. On each rank their
            gradient is that of its rows: add up over the group.
        dropout_seed: an int or an int64 tensor [1], the same on every rank; None draws one from
            torch's generator, which then has to be seeded alike on all ranks.
        layout: which tokens of q each rank holds; None means
            ``Layout.contiguous(total, group_size)``. It is that of k and v too where they have the
            same total and ``k_layout`` is None.
        k_layout: which tokens of k and v each rank holds.
        kernel: ``"auto"``, which is the fastest that can do the call, or one by name: ``flash4``,
            ``flash3``, ``flash2``, ``te``, ``cudnn``, ``torch``, ``flex`` or ``reference``; or
            ``te_cp``, TransformerEngine's own context parallelism (see ``te_cp.py``).
        reduce_dtype: what gradients of k and v, and of rows of q computed elsewhere, travel in.
            They are added up in fp32 (fp64 for fp64), and None is that dtype; ``torch.bfloat16``
            halves their bytes and rounds them before they are added.
        q_rows: set by auto-parallelizers that bring k and v whole. (i, n): q is part i of n of the
            sequence, ceil(l / n) tokens each, and k and v are all of it; (0, 1) on one device asks
            for that.
        q_heads: set by auto-parallelizers: (i, n): q is part i of n, all alike, of the heads, and
            k and v have all of theirs.
        team_size: ranks, neighbours in the group, that share out the heads of the same rows
            (Ulysses); divides the group's size, at most h. 1 cuts the sequence alone, all ranks cut
            heads alone, a number between does both. None is what the plan finds the fastest.
    Returns:
        [l, h, vd] in q's dtype; with ``return_lse`` also [h, l], natural log, fp32 (fp64 for fp64).
        Rows that attend nothing are 0, their lse -inf (that of the sink, with a sink).

    Communication: as :func:`wrap_ring_attn_func`, and only tokens of documents that cross a cut.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; names it.
        ValueError: shapes, dtypes, heads, cu_seqlens, layout or group do not fit; says what would.

    Gathering k and v of packed sequences: Llama 3 herd of models, arXiv:2407.21783 (2024), 3.3.2.
    """
    options = Options(
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        alibi_slopes=alibi_slopes,
        sink=sink,
        return_lse=return_lse,
        kernel=kernel,
        layout=layout,
        k_layout=k_layout,
        deterministic=deterministic,
        reduce_dtype=reduce_dtype,
        use_cute=use_cute,
        q_rows=q_rows,
        q_heads=q_heads,
        team_size=team_size,
    )
    return packed_attention(
        RING_ATTN_VARLEN,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        options,
        causal=causal,
        window_size=window_size,
        enable_ring=enable_ring,
        process_group=process_group,
        max_seqlens=(max_seqlen_q, max_seqlen_k),
        return_attn_probs=return_attn_probs,
    )
