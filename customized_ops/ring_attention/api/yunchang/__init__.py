"""The names of yunchang 0.6.4 (long-context-attention, USP) over this package's attention.

there                             here
set_seq_parallel_pg               the same arguments; returns a SequenceParallel, which modules made
                                  from then on keep. parallel= gives a module another, so that
                                  models of several degrees live side by side
LongContextAttention              attention with teams of the Ulysses degree in a ring
LongContextAttentionQKVPacked     the same of one tensor; kv_heads= for grouped queries
AsyncLongContextAttention         the same, but the plan decides which ranks share out heads, so
                                  that attention hides most communication; gradients, an error
                                  there, are exact, and key heads may be fewer
UlyssesAttention                  over sequence_process_group, None being all ranks
EXTRACT_FUNC_DICT, *_extract_local
                                  the tokens that they give there, for every pair of degrees;
                                  lengths need not divide
AttnType                          names kernels, see attn_type
PROCESS_GROUP, SeqAllToAll4D, SeqAllToAll5D, RING_IMPL_DICT
                                  none: no group is global, and attention does its own all-to-all

argument there                    here
sp_ulysses_degree, sp_ring_degree their product divides world_size. The first is at most the query
                                  heads, which need not divide by it, nor need key heads be as many
rank, world_size                  must be those of torch.distributed
use_ulysses_low=False             each rank has the tokens that it has there. If both degrees are
                                  above 1, the plan says which ranks share out heads: its teams are
                                  of neighbours
ring_impl_type                    the layout, whatever the mask: "basic" contiguous, "zigzag",
                                  "strip" striped, a token each, which cuts masks into as many
                                  slices; "basic_pytorch" is basic with torch's kernel.
                                  "basic_flashinfer", "basic_npu": refused, no such kernels
scatter_idx, gather_idx           the dims of heads and of tokens; others are refused
attn_type                         FA: the fastest kernel that can; FA3: "flash3"; TORCH_FLASH and
                                  TORCH_EFFICIENT: "torch"; TORCH_CUDNN: "cudnn"; TORCH_MATH:
                                  "reference". Others are refused, no such kernels
attn_processor                    refused: it is for SPARSE_SAGE, which is
use_sync, use_pack_qkv            True is refused: the executor decides when a rank waits, and what
                                  travels in one message
dropout_p                         drawn by token and head, the same on any number of ranks, from
                                  dropout_seed=
softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
                                  as in flash_attn, over the whole sequence, with every layout
return_attn_probs                 out alone is returned, as there, whether True or False
*args                             refused; ignored there

By keyword, not there: cu_seqlens, packed documents of [l, h, d]; mask, any AttnMask; total, the
length of a sequence that ranks hold unevenly; return_lse.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...core.comm.comm_groups import GroupLike, group_comm
from ...op.arguments import ArgumentError, checked
from .attention import AttnType, SequenceAttention
from .degrees import (
    EXTRACT_FUNC_DICT,
    SequenceParallel,
    basic_extract_local,
    check_degree,
    set_default,
    stripe_extract_local,
    zigzag_extract_local,
)

__all__ = [
    "EXTRACT_FUNC_DICT",
    "AsyncLongContextAttention",
    "AttnType",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "UlyssesAttention",
    "basic_extract_local",
    "set_seq_parallel_pg",
    "stripe_extract_local",
    "zigzag_extract_local",
]


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
) -> SequenceParallel:
    """Set how ranks cut sequences, for modules that are made from now on.

    Every ``sp_ulysses_degree * sp_ring_degree`` neighbouring ranks cut sequences of their own.

    Args:
        rank, world_size: those of torch.distributed.
    Returns:
        The setting, which can also be given to modules as ``parallel=``.
    Raises:
        ArgumentError: degrees do not divide the world, or torch.distributed has another world.
    """
    title = "set_seq_parallel_pg"
    check_degree(title, "sp_ulysses_degree", sp_ulysses_degree)
    check_degree(title, "sp_ring_degree", sp_ring_degree)
    there = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if (rank, world_size) != there:
        raise ArgumentError(
            f"{title}: rank={rank!r} of world_size={world_size!r}, but torch.distributed has rank "
            f"{there[0]} of {there[1]}" + ("" if dist.is_initialized() else " (not initialised)")
        )
    ranks = sp_ulysses_degree * sp_ring_degree
    if world_size % ranks:
        raise ArgumentError(
            f"{title}: sp_ulysses_degree={sp_ulysses_degree} times sp_ring_degree="
            f"{sp_ring_degree} must divide the {world_size} ranks"
        )
    first = rank - rank % ranks
    group = tuple(range(first, first + ranks)) if ranks > 1 else None
    parallel = SequenceParallel(sp_ulysses_degree, sp_ring_degree, group, use_ulysses_low)
    set_default(parallel)
    return parallel


class LongContextAttention(SequenceAttention):
    """Ulysses within a ring over the ranks that cut the sequence.

    Args:
        parallel: how the sequence is cut; None: as set by the last ``set_seq_parallel_pg``. All
            other arguments: see the table above.
    Raises:
        NotImplementedError, ValueError: an argument is refused; the message names it.

    Fang, Zhao: USP: A Unified Sequence Parallelism Approach for Long Context Generative AI,
    arXiv:2405.07719 (2024).
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        attn_processor: object = None,
        *,
        parallel: SequenceParallel | None = None,
    ) -> None:
        super().__init__(
            parallel,
            ring_impl_type,
            attn_type,
            (scatter_idx, gather_idx),
            use_pack_qkv=use_pack_qkv,
            use_sync=use_sync,
            attn_processor=attn_processor,
        )


class AsyncLongContextAttention(LongContextAttention):
    """The same, with the work assigned as the plan finds fastest; gradients are exact.

    Communication overlaps with attention, in the forward and in the backward. The degrees determine
    the layout.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        *,
        parallel: SequenceParallel | None = None,
    ) -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type, parallel=parallel)
        self.team_size = None


class LongContextAttentionQKVPacked(SequenceAttention):
    """:class:`LongContextAttention` for q, k and v in one tensor.

    Args:
        kv_heads: None for qkv of [b, l, 3, h, d]; otherwise qkv is [b, l, h + 2 kv_heads, d], heads
            of q first, then of k, then of v. There is no b if documents are packed.
    """

    DIMS = (3, 1)

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        *,
        parallel: SequenceParallel | None = None,
        kv_heads: int | None = None,
    ) -> None:
        dims = scatter_idx, gather_idx
        super().__init__(parallel, ring_impl_type, attn_type, dims, use_sync=use_sync)
        if kv_heads is not None:
            check_degree(self.title, "kv_heads", kv_heads)
        self.kv_heads = kv_heads

    def forward(self, qkv: Tensor, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        """See :meth:`SequenceAttention.forward`, which takes q, k and v instead."""
        q, k, v = checked(self.title, self.parallel.process_group, lambda: self._unpacked(qkv))
        return super().forward(q, k, v, *args, **more)

    def _unpacked(self, qkv: Tensor) -> tuple[Tensor, ...]:
        if self.kv_heads is None:
            if qkv.ndim < 4 or qkv.shape[-3] != 3:
                raise ArgumentError(
                    f"{self.title}: qkv must be [b, l, 3, h, d], got shape {tuple(qkv.shape)}; "
                    "where key heads are fewer, give kv_heads"
                )
            return qkv.unbind(-3)
        heads = qkv.shape[-2] - 2 * self.kv_heads
        if heads < 1:
            raise ArgumentError(
                f"{self.title}: qkv must have the heads of q and 2 x kv_heads={self.kv_heads} of k "
                f"and v, got shape {tuple(qkv.shape)}"
            )
        return qkv.split([heads, self.kv_heads, self.kv_heads], -2)


class UlyssesAttention(SequenceAttention):
    """Every rank computes all tokens for its share of the heads; shards are contiguous.

    Args:
        sequence_process_group: a ProcessGroup, its global ranks in increasing order, a rank of
            ``run_ranks``, or None for all ranks.

    Jacobs et al.: DeepSpeed Ulysses, arXiv:2309.14509 (2023).
    """

    def __init__(
        self,
        sequence_process_group: GroupLike = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ) -> None:
        group = sequence_process_group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        parallel = SequenceParallel(group_comm(group).size, 1, group)
        super().__init__(parallel, "basic", attn_type, (scatter_idx, gather_idx), use_sync=use_sync)
