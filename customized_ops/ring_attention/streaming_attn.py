"""Streaming attention: a window and the first tokens of the sequence."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .op.arguments import checked, is_integer, tokens_of
from .op.cu_seqlens import CuSeqlens
from .op.documentation import attention_function
from .op.eager import attend
from .op.graph import declare
from .op.mask_source import Documents, MaskSource, OneSequence
from .op.options import SharedOptions

TITLE = "wrap_streaming_attn_func"
# Rows stay with their holder: giving some away would move more than the window and the sinks.
STREAMING_ATTN = declare(
    OneSequence, "seqshard::streaming_attn", TITLE, assignment="owner", split_heads=False
)
STREAMING_ATTN_VARLEN = declare(
    Documents, "seqshard::streaming_attn_varlen", TITLE, assignment="owner", split_heads=False
)


@attention_function
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
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``, or packed, with ``cu_seqlens``,
    ``l (g n) hd^, l g hd^, l g vd^, e^, e^ -> l (g n) vd^``

    Causal attention to a window and to the first tokens of the sequence, or of each document, cut
    contiguously across the ranks of a group; with no group, over the tokens given.

        window 2, sink_tokens 1    rank 0: tokens 0 1 2 3     rank 1: tokens 4 5 6 7
                                   receives nothing           receives keys 2 3, and key 0

    Args:
        q: [b, l, h, hd], this rank's tokens; [l, h, hd] with ``cu_seqlens``. Any strides.
        k, v: [b, l, g, hd] and [b, l, g, vd], or packed without b; h is a multiple of g.
        window: token i attends tokens i - window .. i; -1 is unbounded.
        sink_tokens: every token also attends the first ``sink_tokens`` up to itself; each batch
            entry, or document, its own.
        sink: [h] logits that join the softmax with no value, another kind of sink; learnable. On
            each rank their gradient is that of its rows: add up over the group.
    Returns:
        As :func:`wrap_ring_attn_func`, or packed; it raises the same errors.

    Communication: with contiguous shards, even or uneven, the forward receives at most window +
    sink_tokens tokens of k and v (with documents, the sinks of those whose tokens the rank holds);
    in another layout, what the windows of its pieces reach, and the sinks. The backward receives
    the same, and sends as many of dk and dv home.

    Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks,
    arXiv:2309.17453 (2023).
    """
    window_size = checked(TITLE, process_group, lambda: _window_size(window))
    op = STREAMING_ATTN
    source: MaskSource = OneSequence(True, window_size, sink_tokens)
    if cu_seqlens is not None:
        op = STREAMING_ATTN_VARLEN
        source = Documents(cu_seqlens, cu_seqlens, True, window_size, sink_tokens)
    return attend(
        op,
        q,
        k,
        v,
        source,
        process_group,
        options,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=return_lse,
    )


def _window_size(window: int) -> tuple[int, int]:
    unbounded = is_integer(window, -1) and window == -1
    return (-1 if unbounded else tokens_of(TITLE, "window (-1: unbounded)", window)), 0
