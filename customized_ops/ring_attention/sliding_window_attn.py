"""Sliding-window attention: only the halo moves, however many ranks a window spans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .op.arguments import Options
from .op.attention_op import declare
from .op.dense_attn import DENSE, dense_attention
from .op.packed_attn import PACKED, packed_attention
from .varlen_utils import CuSeqlens

TITLE = "wrap_sliding_window_attn_func"
# Rows stay with their holder: giving some away would move more than the halo.
SLIDING_WINDOW_ATTN = declare(
    DENSE, "seqshard::sliding_window_attn", TITLE, assignment="owner", split_heads=False
)
SLIDING_WINDOW_ATTN_VARLEN = declare(
    PACKED, "seqshard::sliding_window_attn_varlen", TITLE, assignment="owner", split_heads=False
)


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
    *,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    layout: Layout | None = None,
    kernel: str = "auto",
    reduce_dtype: torch.dtype | None = None,
    q_rows: tuple[int, int] | None = None,
    q_heads: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``, or packed, with ``cu_seqlens``,
    ``l (g n) hd^, l g hd^, l g vd^, e^, e^ -> l (g n) vd^``

    Sliding-window attention over tokens that are cut contiguously across the ranks of a group; with
    no group, over the tokens given. A rank receives the keys that its window reaches beyond its own
    tokens, from as many ranks as hold some, and nothing else moves. With contiguous shards, even or
    uneven, that is at most left + right tokens; in another layout each piece of a rank's tokens has
    a window of its own.

        window_size (2, 0)    rank 0: tokens 0 1 2 3     rank 1: tokens 4 5 6 7
                              receives nothing           receives keys 2 3

    Args:
        q: [b, l, h, hd], this rank's tokens; [l, h, hd] with ``cu_seqlens``. Any strides.
        k: [b, l, g, hd], v: [b, l, g, vd], or [l, g, hd] and [l, g, vd]; h is a multiple of g.
        cu_seqlens_q, cu_seqlens_k: [documents + 1], int32 or int64, cumulative lengths of the whole
            packed sequence, the same on every rank; windows end at documents' ends. None if not
            packed.
        alibi_slopes: [h] or [b, h]: what a score loses per token of distance. No gradient.
        dropout_p: the share of probabilities that become 0, in [0, 1). Which ones is drawn by
            token, head and batch entry, so it is the same on any number of ranks.
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(hd).
        causal: no token attends a later one.
        window_size: (left, right): token i attends tokens i - left .. i + right; -1 is unbounded.
        deterministic: gradients are the same bit for bit from run to run, which costs some kernels
            time; out always is. ``torch.use_deterministic_algorithms(True)`` asks for it too.
        return_attn_probs: only False.
        enable_ring: False computes on this rank alone, whatever ``process_group`` says.
        use_cute: True asks for flash-attn-4, as ``kernel="flash4"`` does.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        return_lse: also return the log-sum-exp of the scaled scores; gradients flow through it.
        max_seqlen_q, max_seqlen_k: go with ``cu_seqlens``; not needed, checked if given.
        softcap: scores are kept in (-softcap, softcap) by a tanh; 0 is none.
        sink: [h] logits that join the softmax with no value; learnable. On each rank their
            gradient is that of its rows: add up over the group.
        dropout_seed: an int or an int64 tensor [1], the same on every rank; None draws one from
            torch's generator, which then has to be seeded alike on all ranks.
        layout: which tokens each rank holds; None means contiguous shards, as many tokens on every
            rank where not packed.
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
    Returns:
        As q, with vd, in q's dtype; with ``return_lse`` also [b, h, l] or [h, l], natural log, fp32
        (fp64 for fp64).

    Communication: with contiguous shards the forward receives at most left + right tokens of k and
    v; in another layout, what the windows of its pieces reach. The backward receives the same, and
    sends as many of dk and dv home.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; names it.
        ValueError: shapes, dtypes, heads, cu_seqlens, layout or group do not fit; says what would.

    Beltagy, Peters, Cohan: Longformer, arXiv:2004.05150 (2020).
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
        deterministic=deterministic,
        reduce_dtype=reduce_dtype,
        use_cute=use_cute,
        q_rows=q_rows,
        q_heads=q_heads,
    )
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return dense_attention(
            SLIDING_WINDOW_ATTN,
            q,
            k,
            v,
            options,
            causal=causal,
            window_size=window_size,
            enable_ring=enable_ring,
            process_group=process_group,
            max_seqlens=(max_seqlen_q, max_seqlen_k),
            return_attn_probs=return_attn_probs,
        )
    return packed_attention(
        SLIDING_WINDOW_ATTN_VARLEN,
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
