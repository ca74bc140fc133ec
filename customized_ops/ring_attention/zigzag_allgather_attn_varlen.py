"""Attention of packed tokens that are laid out zigzag, over keys that are whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from .core.comm.comm_groups import GroupLike, comm_by_name, group_name
from .maybe_shuffle import layout_by_document
from .op import CuSeqlens, PackedSequence, SharedOptions, attend, attention_function, declare
from .op.arguments import ArgumentError, ring_group
from .op.documentation import flash_annotation

ZIGZAG_ALLGATHER_ATTN_VARLEN = declare(
    PackedSequence,
    "seqshard::zigzag_allgather_attn_varlen",
    "wrap_zigzag_allgather_attn_varlen_func",
    assignment="owner",
)


@attention_function
def wrap_zigzag_allgather_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    deterministic: bool = False,
    return_attn_probs: bool = False,
    enable_ring: bool = True,
    use_cute: bool = False,
    process_group: GroupLike = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[SharedOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """``l (g n) hd^, al^ g hd^, al^ g vd^, e^, e^ -> l (g n) vd^``

    Attention inside packed documents where q comes as :func:`wrap_maybe_shuffle` lays tokens out,
    each document zigzag by itself, while k and v are whole and in natural order on every rank;
    with no group, over the tokens given.

        cu_seqlens = [0, 4, 8]    rank 0: q  a0 a3 b0 b3    k  a0 a1 a2 a3 b0 b1 b2 b3
        causal                    rank 1: q  a1 a2 b1 b2    k  the same

    Args:
        q: [l, h, hd], this rank's tokens; any strides.
        k, v: [al, g, hd] and [al, g, vd], all tokens; h is a multiple of g (grouped queries).
        cu_seqlens_q, cu_seqlens_k: [documents + 1], int32 or int64, of the whole sequence, the same
            on every rank: start at 0, never fall (a document may be empty), end at the total.
        alibi_slopes: [h] or [1, h]: what a score loses per token of distance; only with no group.
        dropout_p: the share of probabilities that become 0; only with no group.
        causal: a token attends its document up to itself; aligned at the documents' ends where
            their lengths in q and k differ.
        layout, q_rows: set by auto-parallelizers; None with a group.
    Returns:
        [l, h, vd] in q's dtype; with ``return_lse`` also [h, l], as :func:`wrap_ring_attn_func`,
        which raises the same errors.

    Communication: none. The gradients of k and v are those of this rank's rows only: add them up
    over the group.

    Llama 3 herd of models, arXiv:2407.21783 (2024), section 3.3.2.
    """
    op = ZIGZAG_ALLGATHER_ATTN_VARLEN
    comm = comm_by_name(group_name(ring_group(enable_ring, process_group)))
    if comm.size > 1:
        for name in ("layout", "q_rows"):
            if options.get(name) is not None:
                raise ArgumentError(f"{op.title}: {name} follows from the group; leave it None")
        options["layout"] = layout_by_document(cu_seqlens_q, comm.size)
        options["q_rows"] = comm.rank, comm.size
    elif options.get("q_rows") is None and not dropout_p:
        options["q_rows"] = 0, 1
    own = (alibi_slopes, softmax_scale, dropout_p, deterministic, return_lse, None, None, use_cute)
    longest, cu = (max_seqlen_q, max_seqlen_k), (cu_seqlens_q, cu_seqlens_k)
    source = PackedSequence(causal, window_size, 0, enable_ring, longest, *cu)
    return attend(op, q, k, v, source, None, own, options, return_attn_probs)


flash_attention_anno = flash_annotation(wrap_zigzag_allgather_attn_varlen_func, keys="al^")
