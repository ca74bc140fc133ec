"""Streaming attention: a window and the first tokens of the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .op.arguments import Options, checked, is_integer, tokens_of
from .op.attention_op import declare
from .op.dense_attn import DENSE, dense_attention
from .op.packed_attn import PACKED, packed_attention
from .varlen_utils import CuSeqlens

TITLE = "wrap_streaming_attn_func"
# Rows stay with their holder: giving some away would move more than the window and the sinks.
STREAMING_ATTN = declare(
    DENSE, "seqshard::streaming_attn", TITLE, assignment="owner", split_heads=False
)
STREAMING_ATTN_VARLEN = declare(
    PACKED, "seqshard::streaming_attn_varlen", TITLE, assignment="owner", split_heads=False
)


def wrap_streaming_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sink_tokens: int,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    process_group: GroupLike = None,
    *,
    cu_seqlens: CuSeqlens | None = None,
    return_lse: bool = False,
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

    Causal attention to a window and to the first tokens of the sequence, or of each document, cut
    contiguously across the ranks of a group; with no group, over the tokens given.

        window 2, sink_tokens 1    rank 0: tokens 0 1 2 3     rank 1: tokens 4 5 6 7
                                   receives nothing           receives keys 2 3, and key 0

    Args:
        q: [b, l, h, hd], this rank's tokens; [l, h, hd] with ``cu_seqlens``. Any strides.
        k: [b, l, g, hd], v: [b, l, g, vd], or [l, g, hd] and [l, g, vd]; h is a multiple of g.
        window: token i attends tokens i - window .. i; -1 is unbounded.
        sink_tokens: every token also attends the first ``sink_tokens`` up to itself; each batch
            entry, or document, its own.
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(hd).
        dropout_p: the share of probabilities that become 0, in [0, 1). Which ones is drawn by
            token, head and batch entry, so it is the same on any number of ranks.
        alibi_slopes: [h] or [b, h]: what a score loses per token of distance. No gradient.
        deterministic: gradients are the same bit for bit from run to run, which costs some kernels
            time; out always is. ``torch.use_deterministic_algorithms(True)`` asks for it too.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        cu_seqlens: [documents + 1], int32 or int64, cumulative lengths of the whole packed
            sequence, the same on every rank. None if not packed.
        return_lse: also return the log-sum-exp of the scaled scores; gradients flow through it.
        softcap: scores are kept in (-softcap, softcap) by a tanh; 0 is none.
        sink: [h] logits that join the softmax with no value, another kind of sink; learnable. On
            each rank their gradient is that of its rows: add up over the group.
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

    Communication: with contiguous shards, even or uneven, the forward receives at most window +
    sink_tokens tokens of k and v (with documents, the sinks of those whose tokens the rank holds);
    in another layout, what the windows of its pieces reach, and the sinks. The backward receives
    the same, and sends as many of dk and dv home.

    Raises:
        ValueError: shapes, dtypes, heads, cu_seqlens, layout or group do not fit; says what would.

    Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks,
    arXiv:2309.17453 (2023).
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
        q_rows=q_rows,
        q_heads=q_heads,
    )
    window_size = checked(TITLE, process_group, lambda: _window_size(window))
    if cu_seqlens is None:
        return dense_attention(
            STREAMING_ATTN,
            q,
            k,
            v,
            options,
            causal=True,
            window_size=window_size,
            sink_tokens=sink_tokens,
            process_group=process_group,
        )
    return packed_attention(
        STREAMING_ATTN_VARLEN,
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        options,
        causal=True,
        window_size=window_size,
        sink_tokens=sink_tokens,
        enable_ring=True,
        process_group=process_group,
        max_seqlens=(None, None),
    )


def _window_size(window: int) -> tuple[int, int]:
    unbounded = is_integer(window, -1) and window == -1
    return (-1 if unbounded else tokens_of(TITLE, "window (-1: unbounded)", window)), 0
