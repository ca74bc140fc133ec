"""Packed documents cut anywhere, which ring_flash_attn takes from Llama 3; see its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike
from ...op.arguments import ArgumentError, checked, is_integer
from ...op.tokens.lengths import CuSeqlens, as_tensor, check_cu_seqlens, check_max_seqlen, on_host
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from .calls import Result, comm_of


class EveryDocument(int):
    """The step of ``local_k_slice``: the integer 1, which also carries the documents of all ranks.

    Users pass that slice on from ``llama3_flash_attn_prepare_cu_seqlens`` in any case, and with
    this step it cuts like a slice without one.
    """

    cu_seqlens: tuple[int, ...]
    causal: bool
    rank: int
    world_size: int


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: CuSeqlens, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Arguments of :func:`llama3_flash_attn_varlen_func` for one rank's part of packed documents.

        cu_seqlens = [0, 3, 8], 2 ranks    rank 1 holds tokens 4..7: cu_seqlens_q = [0, 4],
                                           cu_seqlens_k = [0, 5], local_k_slice = 3:8

    Args:
        cu_seqlens: [documents + 1] of the whole sequence, the same on every rank.
        causal: whether keys end with this rank's rows, or with the last document.
        rank, world_size: which of how many equal parts.
    Returns:
        cu_seqlens_q of the rank's rows, cu_seqlens_k of the keys of their documents (dtype and
        device of ``cu_seqlens``), the longest document of each, and the slice of the whole sequence
        where those keys are.
    Raises:
        ArgumentError: ``cu_seqlens`` decrease, ``world_size`` does not divide their total, or
            ``rank`` is not one of its ranks.
    """
    title = "llama3_flash_attn_prepare_cu_seqlens"
    given = as_tensor(title, "cu_seqlens", cu_seqlens)
    cu = on_host(given)
    check_cu_seqlens(title, "cu_seqlens", cu)
    if not (is_integer(world_size, 1) and is_integer(rank) and rank < world_size):
        raise ArgumentError(f"{title}: rank={rank!r} is none of world_size={world_size!r} ranks")
    if cu[-1] % world_size:
        raise ArgumentError(
            f"{title}: {world_size} ranks do not hold equal parts of {cu[-1]} tokens; pad the last "
            "document"
        )
    rows = int(cu[-1]) // world_size
    start, stop = rank * rows, (rank + 1) * rows
    here = np.flatnonzero((cu[1:] > start) & (cu[:-1] < stop))
    own = cu[here[0] : here[-1] + 2] if len(here) else cu[:1]
    first, last = int(own[0]), stop if causal else int(own[-1])
    cu_q, cu_k = own.clip(start, stop) - start, own.clip(max=last) - first
    step = EveryDocument(1)
    step.cu_seqlens, step.causal = tuple(cu.tolist()), bool(causal)
    step.rank, step.world_size = int(rank), int(world_size)
    longest = (int(np.diff(each).max(initial=0)) for each in (cu_q, cu_k))
    tensors = (torch.from_numpy(each).to(given) for each in (cu_q, cu_k))
    return (*tensors, *longest, slice(first, last, step))  # type: ignore[return-value]


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike = None,
) -> Result:
    """``l (g n) d, l g d, l g d -> l (g n) d``: q, k and v are this rank's equal part of packed
    documents. Arguments: the table at the top of ``ring_flash_attn``.

    Raises:
        ArgumentError: the arguments that describe the documents are not those that
            :func:`llama3_flash_attn_prepare_cu_seqlens` returned for this call.
    """
    title = "llama3_flash_attn_varlen_func"
    comm = comm_of(title, group)
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)
    whole = checked(title, comm, lambda: _whole_documents(title, comm, bool(causal), *given))
    result = by_key_heads(
        title,
        heads_k_stride,
        (q, k, v),
        whole,
        comm,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (*result, None) if return_attn_probs else result


def _whole_documents(title: str, comm: Comm, causal: bool, *given: Any) -> npt.NDArray[np.int64]:
    """``cu_seqlens`` of all ranks. ``given``: the rank's arguments, starting with cu_seqlens_q."""
    step = given[4].step if isinstance(given[4], slice) else None
    if not isinstance(step, EveryDocument):
        raise ArgumentError(
            f"{title}: local_k_slice must be the one that llama3_flash_attn_prepare_cu_seqlens of "
            f"this module returned, which knows the documents of all ranks; got {given[4]!r}"
        )
    made_for = f"rank {step.rank} of {step.world_size}, causal={step.causal}"
    used_by = f"rank {comm.rank} of {comm.size}, causal={causal}"
    if made_for != used_by:
        raise ArgumentError(
            f"{title}: local_k_slice was prepared for {made_for}, but this is {used_by}"
        )
    cu = torch.tensor(step.cu_seqlens)
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu, causal, step.rank, step.world_size)
    for side, lengths, longest, want in zip("qk", given, given[2:], prepared[:2], strict=False):
        if not np.array_equal(on_host(as_tensor(title, f"cu_seqlens_{side}", lengths)), want):
            raise ArgumentError(
                f"{title}: cu_seqlens_{side} must be {want.tolist()}, as prepared with "
                "local_k_slice"
            )
        check_max_seqlen(title, f"max_seqlen_{side}", longest, want.numpy())
    return cu.numpy()


def by_key_heads(
    title: str,
    stride: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: npt.NDArray[np.int64],
    comm: Comm,
    *,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    **options: Any,
) -> Any:
    """:func:`wrap_ring_attn_varlen_func` on ``stride`` key heads, and their query heads, at a time,
    so that no more keys are received at once."""
    heads = qkv[1].shape[-2]

    def check() -> int:
        if not is_integer(stride, 1) or heads % stride:
            raise ArgumentError(
                f"{title}: heads_k_stride must divide the {heads} key heads, got {stride!r}"
            )
        return max(1, heads // stride)

    calls = checked(title, comm, check)
    if qkv[0].shape[-2] % heads:  # the op will report it
        calls = 1
    parts: list[Any] = [t.tensor_split(calls, -2) for t in qkv]
    for each in (alibi_slopes, sink):
        parts.append([None] * calls if each is None else each.tensor_split(calls, -1))
    cu = cu_seqlens
    results: list[Any] = [
        wrap_ring_attn_varlen_func(
            q, k, v, cu, cu, slopes, sink=logits, process_group=comm, **options
        )
        for q, k, v, slopes, logits in zip(*parts, strict=True)
    ]
    if calls == 1:
        return results[0]
    if not options.get("return_lse"):
        return torch.cat(results, 1)
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 0)
