"""Zigzag attention: each rank computes an early and a late chunk, which balances causal masks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .core.groups import GroupLike
from .core.layout import Layout
from .dense_attn import dense_attention, dense_op

ZIGZAG_ATTN = dense_op("seqshard::zigzag_attn", "wrap_zigzag_attn_func", assignment="zigzag")


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
    layout: Layout | None = None,
    kernel: str = "auto",
) -> Tensor:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``

    Attention with rows computed in zigzag order: of 2 P chunks rank r computes chunk r and chunk
    2 P - 1 - r, the same work on every rank under a causal mask. Tokens come in contiguous shards,
    and rows travel to the rank that computes them; tokens that already lie so
    (``layout=Layout.zigzag(total, P)``) stay where they are, which is what to use when a whole
    model runs in that order.

        tokens 0..7, 2 ranks, causal    held        computed
        rank 0                          0 1 2 3     0 1 6 7
        rank 1                          4 5 6 7     2 3 4 5

    Args:
        q: [b, l, h, hd], this rank's tokens; any strides.
        k: [b, l, g, hd], v: [b, l, g, vd]; h is a multiple of g (grouped queries).
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(hd).
        dropout_p: only 0.0 for now.
        causal: token i attends tokens 0..i.
        window_size: (left, right): token i attends tokens i - left .. i + right; -1 is unbounded.
        alibi_slopes: only None for now.
        deterministic: accepted either way; forward and backward always are.
        return_attn_probs: only False.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        layout: which tokens each rank holds; None means as many on every rank, in order. Besides
            ``Layout.zigzag``, ``Layout.contiguous`` and ``Layout.from_sizes`` allow uneven shards.
        kernel: ``"auto"``, ``"torch"`` or ``"reference"``.
    Returns:
        [b, l, h, vd] in q's dtype. Rows that attend nothing are 0.

    Communication: the forward moves k and v to the ranks that need them, rows of q to the ranks
    that compute them, and their results back. The backward moves the same again, sends dk and dv
    home in fp32, where they are added up, and dq of the rows back.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; names it.
        ValueError: shapes, dtypes, heads, layout or group do not fit; says what would.

    Llama 3 herd of models, arXiv:2407.21783 (2024), section 3.3.2, describes the 2 P chunks;
    merging of partial results: equations in ``core/merge.py``.
    """
    return dense_attention(
        ZIGZAG_ATTN,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        process_group=process_group,
        layout=layout,
        kernel=kernel,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_attn_probs=return_attn_probs,
    )
