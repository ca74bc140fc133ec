"""Zigzag attention: each rank computes an early and a late chunk, which balances causal masks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .op import OneSequence, SharedOptions, attend, attention_function, declare
from .op.documentation import flash_annotation

ZIGZAG_ATTN = declare(
    OneSequence,
    "seqshard::zigzag_attn",
    "wrap_zigzag_attn_func",
    assignment="zigzag",
    split_heads=False,
)


@attention_function
def wrap_zigzag_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    process_group: GroupLike = None,
    *,
    return_lse: bool = False,
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``

    Attention with rows computed in zigzag order: of 2 P chunks rank r computes chunk r and chunk
    2 P - 1 - r, the same work on every rank under a causal mask. Tokens come in contiguous shards,
    and rows travel to the rank that computes them. With ``layout=Layout.zigzag(total, P)`` tokens
    come in that order and stay where they are: use this when a whole model runs in it.

        tokens 0..7, 2 ranks, causal    held        computed
        rank 0                          0 1 2 3     0 1 6 7
        rank 1                          4 5 6 7     2 3 4 5

    Args:
        layout: which tokens each rank holds; None means equally many on each, in order. Besides
            ``Layout.zigzag``, ``Layout.contiguous`` and ``Layout.from_sizes`` allow uneven shards.
    Returns:
        As :func:`wrap_ring_attn_func`, which raises the same errors.

    Communication: the forward moves k and v to the ranks that need them, rows of q to the ranks
    that compute them, and their results back. The backward moves the same again, sends dk and dv
    home, where they are added up, and dq of the rows back.

    Llama 3 herd of models, arXiv:2407.21783 (2024), section 3.3.2, describes the 2 P chunks;
    merging of partial results: equations in ``core/merge/merge.py``.
    """
    own = alibi_slopes, softmax_scale, dropout_p, deterministic, return_lse
    source = OneSequence(causal, window_size)
    return attend(ZIGZAG_ATTN, q, k, v, source, process_group, own, options, return_attn_probs)


flash_attention_anno = flash_annotation(wrap_zigzag_attn_func)
