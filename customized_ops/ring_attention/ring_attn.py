"""Ring attention: exact attention over a sequence cut across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .core.groups import GroupLike
from .core.layout import Layout
from .dense_attn import dense_attention, dense_op

RING_ATTN = dense_op("seqshard::ring_attn", "wrap_ring_attn_func", assignment="balanced")


def wrap_ring_attn_func(
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

    Attention over a sequence whose tokens are cut contiguously across the ranks of a group; with no
    group, over the tokens given.

        rank 0: tokens 0 1 2 3         rank 1: tokens 4 5 6 7        causal
        attends 0 1 2 3                attends 4 5 6 7 to 0..7, less the rows that
        and rank 1's first rows        it gives to rank 0 so that both work as long

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
        layout: which tokens each rank holds; None means as many on every rank, in order.
            ``Layout.contiguous(total, group_size)`` and ``Layout.from_sizes`` allow uneven shards.
        kernel: ``"auto"``, ``"torch"`` or ``"reference"``.
    Returns:
        [b, l, h, vd] in q's dtype. Rows that attend nothing are 0.

    Communication: the forward moves k and v to the ranks that need them, and rows of q and their
    results where that balances the work. The backward moves the same k and v again, sends dk and dv
    home in fp32, where they are added up, and moves q, out, dout and dq of the rows given away.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; names it.
        ValueError: shapes, dtypes, heads, layout or group do not fit; says what would.

    Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context,
    arXiv:2310.01889 (2023). Merging of partial results: equations in ``core/merge.py``.
    """
    return dense_attention(
        RING_ATTN,
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
