"""Zigzag attention: each rank computes an early and a late chunk, which balances causal masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .op.arguments import Options
from .op.attention_op import declare
from .op.dense_attn import DENSE, dense_attention

ZIGZAG_ATTN = declare(
    DENSE, "seqshard::zigzag_attn", "wrap_zigzag_attn_func", assignment="zigzag", split_heads=False
)


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
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    layout: Layout | None = None,
    kernel: str = "auto",
    reduce_dtype: torch.dtype | None = None,
    q_rows: tuple[int, int] | None = None,
    q_heads: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
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
        dropout_p: the share of probabilities that become 0, in [0, 1). Which ones is drawn by
            token, head and batch entry, so it is the same on any number of ranks.
        causal: token i attends tokens 0..i.
        window_size: (left, right): token i attends tokens i - left .. i + right; -1 is unbounded.
        alibi_slopes: [h] or [b, h]: what a score loses per token of distance. No gradient.
        deterministic: gradients are the same bit for bit from run to run, which costs some kernels
            time; out always is. ``torch.use_deterministic_algorithms(True)`` asks for it too.
        return_attn_probs: only False.
        process_group: ranks over which l is cut: a ProcessGroup, its global ranks in increasing
            order, or None. Leave it None under an auto-parallelizer, which fills it in.
        return_lse: also return the log-sum-exp of the scaled scores; gradients flow through it.
        softcap: scores are kept in (-softcap, softcap) by a tanh; 0 is none.
        sink: [h] logits that join the softmax with no value; learnable. On each rank their
            gradient is that of its rows: add up over the group.
        dropout_seed: an int or an int64 tensor [1], the same on every rank; None draws one from
            torch's generator, which then has to be seeded alike on all ranks.
        layout: which tokens each rank holds; None means as many on every rank, in order. Besides
            ``Layout.zigzag``, ``Layout.contiguous`` and ``Layout.from_sizes`` allow uneven shards.
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
        [b, l, h, vd] in q's dtype; with ``return_lse`` also [b, h, l], natural log, fp32 (fp64 for
        fp64). Rows that attend nothing are 0, their lse -inf (that of the sink, with a sink).

    Communication: the forward moves k and v to the ranks that need them, rows of q to the ranks
    that compute them, and their results back. The backward moves the same again, sends dk and dv
    home in ``reduce_dtype``, where they are added up, and dq of the rows back.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; names it.
        ValueError: shapes, dtypes, heads, layout or group do not fit; says what would.

    Llama 3 herd of models, arXiv:2407.21783 (2024), section 3.3.2, describes the 2 P chunks;
    merging of partial results: equations in ``core/merge.py``.
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
    return dense_attention(
        ZIGZAG_ATTN,
        q,
        k,
        v,
        options,
        causal=causal,
        window_size=window_size,
        process_group=process_group,
        return_attn_probs=return_attn_probs,
    )
