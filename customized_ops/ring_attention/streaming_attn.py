"""Streaming attention: a window and the first tokens of the sequence."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .op import CuSeqlens, SharedOptions, attend, attention_function, declare_both
from .op.arguments import window_before
from .op.window_source import sequence_or_documents

# Rows stay with their holder: giving some away would move more than the window and the sinks.
STREAMING_ATTN, STREAMING_ATTN_VARLEN = declare_both(
    "seqshard::streaming_attn", "wrap_streaming_attn_func", assignment="owner", split_heads=False
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
        window: token i attends tokens i - window .. i; -1 is unbounded.
        sink_tokens: every token also attends the first ``sink_tokens`` tokens of its batch entry,
            or document, up to itself.
        sink: [h] learnable logits that join the softmax with no value, another kind of sink. On
            each rank their gradient is that of its own rows: add it up over the group.
    Returns:
        As :func:`wrap_ring_attn_func`, or packed; it raises the same errors.

    Communication: with contiguous shards, even or uneven, the forward receives at most window +
    sink_tokens tokens of k and v (with documents, the sinks of those whose tokens the rank holds);
    in another layout, the tokens that the windows of its pieces reach, and the sinks. The backward
    receives the same, and sends as many tokens of dk and dv home.

    Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks,
    arXiv:2309.17453 (2023).
    """
    own = alibi_slopes, softmax_scale, dropout_p, deterministic, return_lse
    bounds = window_before(STREAMING_ATTN.title, window, process_group)
    said = True, bounds, sink_tokens, True, (None, None)
    source = sequence_or_documents(*said, cu_seqlens, cu_seqlens)
    op = STREAMING_ATTN_VARLEN if source.packed else STREAMING_ATTN
    return attend(op, q, k, v, source, process_group, own, options)
