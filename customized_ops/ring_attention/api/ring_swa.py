"""The names of ring_swa (ring-sliding-window-attention) over this package's attention.

there                             here
ring_sliding_window_attn          wrap_sliding_window_attn_func, causal
ring_sliding_window_attn_varlen   the same with cu_seqlens
ring_streaming_llm_attn           wrap_streaming_attn_func
ring_streaming_llm_attn_varlen    the same with cu_seqlens
ring_swa.ops                      none: ranks of the ring need not be given

argument there                    here
window_size                       how many tokens before itself a token attends to; -1, unbounded
cu_seqlens                        of all ranks, a tensor or list; need not divide by the ranks
cp_group                          a ProcessGroup, its global ranks in increasing order, a rank of
                                  run_ranks; None is one rank
cp_size, cp_local_rank            those of cp_group, if given; other values are refused, because
                                  rank n of cp_group holds the n-th part of the sequence
cp_prev_global_rank, cp_next_global_rank
                                  the global ranks beside this one in cp_group, if given; other
                                  values are refused for the same reason
softmax_scale                     None is 1 / sqrt(head dim)

Every sequence of a batch and every document has a first token of its own, with its own gradient;
in ring_swa one stands for all. Keywords that ring_swa lacks: layout, which tokens each rank holds,
if not equal numbers in order; sink_tokens, how many first tokens every token attends to;
return_lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, group_comm
from ..core.layout import Layout
from ..op.arguments import ArgumentError, checked, tokens_of
from ..op.tokens.lengths import CuSeqlens
from ..sliding_window_attn import wrap_sliding_window_attn_func
from ..streaming_attn import wrap_streaming_attn_func
from .peer_calls import with_fixed


def _attention(
    title: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: int,
    cu_seqlens: CuSeqlens | None,
    cp_group: GroupLike = None,
    cp_size: int | None = None,
    cp_local_rank: int | None = None,
    cp_prev_global_rank: int | None = None,
    cp_next_global_rank: int | None = None,
    softmax_scale: float | None = None,
    *,
    sink_tokens: int | None = 1,
    layout: Layout | None = None,
    return_lse: bool = False,
) -> Any:
    """All four functions; without documents cu_seqlens is None, without sinks sink_tokens is."""
    ring = {
        "cp_size": cp_size,
        "cp_local_rank": cp_local_rank,
        "cp_prev_global_rank": cp_prev_global_rank,
        "cp_next_global_rank": cp_next_global_rank,
    }

    def check() -> int:
        if any(each is not None for each in ring.values()):
            _check_ring(title, cp_group, ring)
        unbounded = isinstance(window_size, int) and window_size == -1
        return -1 if unbounded else tokens_of(title, "window_size", window_size)

    window = checked(title, cp_group, check)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "process_group": cp_group,
        "layout": layout,
        "return_lse": return_lse,
    }
    if sink_tokens is None:
        both = cu_seqlens, cu_seqlens
        return wrap_sliding_window_attn_func(q, k, v, *both, window_size=(window, 0), **options)
    return wrap_streaming_attn_func(q, k, v, window, sink_tokens, cu_seqlens=cu_seqlens, **options)


def _check_ring(title: str, cp_group: GroupLike, given: dict[str, int | None]) -> None:
    comm = group_comm(cp_group)
    ranks = _global_ranks(cp_group, comm)
    wanted = comm.size, comm.rank, ranks[comm.rank - 1], ranks[(comm.rank + 1) % comm.size]
    for (name, value), there in zip(given.items(), wanted, strict=True):
        if value is not None and value != there:
            raise ArgumentError(
                f"{title}: {name}={value!r}, but in cp_group it is {there}, where rank n holds the "
                "n-th part of the sequence; leave it None, or cut the sequence by rank in cp_group"
            )


def _global_ranks(group: GroupLike, comm: Comm) -> Sequence[int]:
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    if isinstance(group, Comm) or group is None:
        return range(comm.size)
    return group


ring_sliding_window_attn = with_fixed(
    _attention,
    "ring_sliding_window_attn",
    """Causal attention to a window, over a sequence cut across the ranks of a group.

    Args:
        q: [b, l, h, d], this rank's tokens. k: [b, l, g, d], v: [b, l, g, e]; h is a multiple of g.
        window_size: token i attends tokens i - window_size .. i. All others: see the table above.
    Returns:
        [b, l, h, e] in q's dtype; with ``return_lse`` also the log-sum-exp, [b, h, l].
    Raises:
        ValueError: arguments do not fit the group or one another; says what would.

    Beltagy, Peters, Cohan: Longformer, arXiv:2004.05150 (2020).
    """,
    cu_seqlens=None,
    sink_tokens=None,
)
ring_sliding_window_attn_varlen = with_fixed(
    _attention,
    "ring_sliding_window_attn_varlen",
    """:func:`ring_sliding_window_attn` inside packed documents.

    Args:
        q: [l, h, d], k: [l, g, d], v: [l, g, e]. cu_seqlens: [documents + 1], integers.
    Returns:
        [l, h, e] in q's dtype; with ``return_lse`` also [h, l].
    """,
    sink_tokens=None,
)
ring_streaming_llm_attn = with_fixed(
    _attention,
    "ring_streaming_llm_attn",
    """:func:`ring_sliding_window_attn`, where every token also attends the first ``sink_tokens``
    of its sequence.

    Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks,
    arXiv:2309.17453 (2023).
    """,
    cu_seqlens=None,
)
ring_streaming_llm_attn_varlen = with_fixed(
    _attention,
    "ring_streaming_llm_attn_varlen",
    """:func:`ring_streaming_llm_attn` inside packed documents, each with first tokens of its own;
    shapes as in :func:`ring_sliding_window_attn_varlen`.
    """,
)
