"""Ring attention: exact attention over a sequence cut across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike
from .op import OneSequence, SharedOptions, attend, attention_function, declare
from .op.documentation import flash_annotation

RING_ATTN = declare(OneSequence, "seqshard::ring_attn", "wrap_ring_attn_func")


@attention_function
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
    return_lse: bool = False,
    team_size: int | None = None,
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``

    Attention over a sequence whose tokens are cut contiguously across the ranks of a group; with no
    group, over the tokens given.

        rank 0: tokens 0 1 2 3         rank 1: tokens 4 5 6 7        causal
        attends 0 1 2 3                attends 4 5 6 7 to 0..7, less the rows that
        and rank 1's first rows        it gives to rank 0 so that both work as long

    Returns:
        [b, l, h, vd] in q's dtype; with ``return_lse`` also [b, h, l], natural log, fp32 (fp64 for
        fp64). Rows that attend nothing are 0, and their lse is -inf (with a sink, the sink's).

    Communication: the forward moves k and v to the ranks that need them, and rows of q and their
    results where that balances the work. The backward moves the same k and v again, sends dk and dv
    home, where they are added up, and moves q, out, dout and dq of the rows given away.

    Raises:
        NotImplementedError: an argument that is not supported yet is set; the message names it.
        ValueError: shapes, dtypes, heads, layout or group do not fit; the message says what would.

    Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context,
    arXiv:2310.01889 (2023). Merging of partial results: equations in ``core/merge/merge.py``.
    """
    own = alibi_slopes, softmax_scale, dropout_p, deterministic, return_lse, team_size
    source = OneSequence(causal, window_size)
    return attend(RING_ATTN, q, k, v, source, process_group, own, options, return_attn_probs)


flash_attention_anno = flash_annotation(wrap_ring_attn_func)
