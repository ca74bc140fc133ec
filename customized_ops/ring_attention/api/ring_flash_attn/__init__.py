"""The functions of ring_flash_attn 0.1.7 (github.com/zhuzilin/ring-flash-attention) on the core.

A program that imports them from here keeps its calls and its shards, and gets the same results.
Each ``_func`` has a ``_kvpacked_func`` and a ``_qkvpacked_func``, as there.

========================================  ========================================================
there                                     here
========================================  ========================================================
``ring_flash_attn_func``                  ``wrap_ring_attn_func`` with ``Layout.contiguous``
``zigzag_ring_flash_attn_func``           ``wrap_zigzag_attn_func`` with ``Layout.zigzag``
``stripe_flash_attn_func``                ``wrap_ring_attn_func`` with ``Layout.striped`` by one
                                          token: a plan has a slice for each, so it is slow to make
``ring_flash_attn_varlen_func``           ``wrap_ring_attn_varlen_func``; rank r holds the r-th of
                                          equal parts of each document
``zigzag_ring_flash_attn_varlen_func``    ``wrap_ring_attn_varlen_func`` with ``Layout.zigzag`` of
                                          each document
``llama3_flash_attn_varlen_func``         ``wrap_ring_attn_varlen_func`` with ``Layout.contiguous``
``llama3_flash_attn_prepare_cu_seqlens``  the same, on the host
``substitute_hf_flash_attn``              the same: registers transformers' "flash_attention_2"
``update_ring_flash_attn_params``         the same: the documents of the forwards that follow
========================================  ========================================================

=====================  ===========================================================================
argument               here
=====================  ===========================================================================
``causal``             False by default, as there; zigzag and stripe accept it, too (not so there)
``window_size``        of the whole sequence or document; there, of each pair of shards
``alibi_slopes``       of the whole sequence or document; refused there
``dropout_p``          drawn by token and head, from a seed that torch's generator gives and that
                       must be the same on all ranks; there the backward draws anew
``deterministic``      honoured; there the forward drops it
``return_attn_probs``  (out, lse, None) as there; lse is [b, h, l], of packed documents [h, l], and
                       gradients flow through it
``group``              a ProcessGroup, the global ranks of one, or an in-process Comm. None is the
                       world, as there, and refused where there is none: alone, a rank would attend
                       its own tokens only
``cu_seqlens``         of this rank's tokens, the same on every rank, as there; zigzag refuses odd
                       lengths, since a rank holds two equal chunks of each document
``max_seqlen``         not needed; refused where a document is longer
``heads_k_stride``     key heads per call, so that no more are received at once: fewer calls are
                       faster. Refused where it does not divide the key heads
``local_k_slice``      it, ``cu_seqlens_q`` and so on must be what ``..._prepare_cu_seqlens`` here
                       returned for the rank, its group and ``causal``: a plan needs the documents
                       of all ranks, and the slice brings them. Others are refused
=====================  ===========================================================================

Models of transformers ask for ``is_causal``, ``scaling``, ``sliding_window``, ``softcap``,
``dropout``, ``deterministic`` and sinks (``s_aux``), all of which are honoured. Refused are padding
masks, a KV cache with earlier tokens, more than one row in a batch, and documents that are passed
to the model: only those of ``update_ring_flash_attn_params`` are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike
from ...core.layout import Layout
from ...op.arguments import ArgumentError, checked
from ...op.tokens.call_layouts import compare_lengths
from ...op.tokens.lengths import CuSeqlens, as_tensor, check_cu_seqlens, check_max_seqlen, on_host
from ...ring_attn import wrap_ring_attn_func
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from ...zigzag_attn import wrap_zigzag_attn_func
from ..peer_calls import with_fixed
from .calls import Result, comm_of, of_packed
from .hf import substitute_hf_flash_attn, update_ring_flash_attn_params
from .llama3 import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


Making = Callable[..., Layout]


def _attention(
    name: str,
    attend: Callable[..., Any],
    making: Making,
    halves: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: CuSeqlens,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike = None,
) -> Result:
    """``attend`` over shards of a layout with ``halves`` chunks per rank.

    Args:
        making: makes the layout from the total or a rank's ``cu_seqlens``, and the number of ranks.
        cu_seqlens: None for one sequence per batch entry.
    """
    comm = comm_of(name, group)

    def check() -> tuple[Any, ...]:
        if cu_seqlens is None:
            return (_even_layout(name, making, halves, q, comm),)
        local = _own_documents(name, cu_seqlens, max_seqlen, halves)
        whole = np.asarray(local) * comm.size
        return _made(making, local, comm.size), whole, whole

    layout, *documents = checked(name, comm, check)
    result = attend(
        q,
        k,
        v,
        *documents,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        process_group=comm,
        return_lse=return_attn_probs,
        layout=layout,
    )
    return (*result, None) if return_attn_probs else result


def _even_layout(name: str, making: Making, halves: int, q: Tensor, comm: Comm) -> Layout | None:
    """The layout with equally many tokens on every rank; ranks compare their lengths."""
    if q.ndim != 4:  # the op says what is wrong with q
        return None
    rows = q.shape[1]
    compare_lengths(name, comm, rows)
    if rows % halves:
        raise ArgumentError(
            f"{name}: a rank holds two chunks of equal length, so dim 1 of q must be even, got "
            f"q of shape {tuple(q.shape)}"
        )
    return _made(making, rows * comm.size, comm.size)


def _own_documents(
    name: str, cu_seqlens: CuSeqlens, max_seqlen: int, halves: int
) -> tuple[int, ...]:
    """``cu_seqlens`` of one rank, checked."""
    local = on_host(as_tensor(name, "cu_seqlens", cu_seqlens))
    check_cu_seqlens(name, "cu_seqlens", local)
    check_max_seqlen(name, "max_seqlen", max_seqlen, local)
    odd = np.flatnonzero(np.diff(local) % halves)
    if len(odd):
        n = int(odd[0])
        raise ArgumentError(
            f"{name}: a rank holds two chunks of equal length of each document, so lengths in "
            f"cu_seqlens must be even, but document {n} has {local[n + 1] - local[n]} tokens here"
        )
    return tuple(local.tolist())


@lru_cache(maxsize=64)
def _made(making: Making, tokens: int | tuple[int, ...], size: int) -> Layout:
    return making(tokens, size)


def _in_turn(local: tuple[int, ...], size: int) -> Layout:
    """Rank r holds the r-th of ``size`` equal parts of each document."""
    documents = list(zip(local, np.diff(local).tolist(), strict=False))
    return Layout.from_ranges(
        [[(size * s + r * n, size * s + (r + 1) * n) for s, n in documents] for r in range(size)]
    )


def _zigzag(local: tuple[int, ...], size: int) -> Layout:
    whole = [size * n for n in local]
    return Layout.zigzag(whole[-1], size, whole)


def _batch_function(
    kind: str, attend: Callable[..., Any], making: Making, halves: int = 1
) -> Callable[..., Result]:
    doc = f"""``b l (g n) d, b l g d, b l g d -> b l (g n) d``: q, k and v as this rank holds them
    in ``Layout.{making.__name__}``. Arguments: the table at the top of this module; errors: those
    of :func:`{attend.__name__}`."""
    fixed = {"attend": attend, "making": making, "halves": halves}
    name = f"{kind}_flash_attn_func"
    return with_fixed(_attention, name, doc, **fixed, cu_seqlens=None, max_seqlen=None)


def _varlen_function(kind: str, making: Making, halves: int = 1) -> Callable[..., Result]:
    doc = """``l (g n) d, l g d, l g d -> l (g n) d``: q, k and v as this rank holds them,
    ``cu_seqlens`` [documents + 1] of its own tokens. Arguments: the table at the top of this
    module; errors: those of :func:`wrap_ring_attn_varlen_func`."""
    fixed = {"attend": wrap_ring_attn_varlen_func, "making": making, "halves": halves}
    return with_fixed(_attention, f"{kind}_flash_attn_varlen_func", doc, **fixed)


# The functions, and variants for one tensor that holds k and v, or q, k and v.
ring_flash_attn_func = _batch_function("ring", wrap_ring_attn_func, Layout.contiguous)
ring_flash_attn_kvpacked_func = of_packed(ring_flash_attn_func, "kv")
ring_flash_attn_qkvpacked_func = of_packed(ring_flash_attn_func, "qkv")

zigzag_ring_flash_attn_func = _batch_function(
    "zigzag_ring", wrap_zigzag_attn_func, Layout.zigzag, 2
)
zigzag_ring_flash_attn_kvpacked_func = of_packed(zigzag_ring_flash_attn_func, "kv")
zigzag_ring_flash_attn_qkvpacked_func = of_packed(zigzag_ring_flash_attn_func, "qkv")

stripe_flash_attn_func = _batch_function("stripe", wrap_ring_attn_func, Layout.striped)
stripe_flash_attn_kvpacked_func = of_packed(stripe_flash_attn_func, "kv")
stripe_flash_attn_qkvpacked_func = of_packed(stripe_flash_attn_func, "qkv")

ring_flash_attn_varlen_func = _varlen_function("ring", _in_turn)
ring_flash_attn_varlen_kvpacked_func = of_packed(ring_flash_attn_varlen_func, "kv")
ring_flash_attn_varlen_qkvpacked_func = of_packed(ring_flash_attn_varlen_func, "qkv")

zigzag_ring_flash_attn_varlen_func = _varlen_function("zigzag_ring", _zigzag, halves=2)
zigzag_ring_flash_attn_varlen_kvpacked_func = of_packed(zigzag_ring_flash_attn_varlen_func, "kv")
zigzag_ring_flash_attn_varlen_qkvpacked_func = of_packed(zigzag_ring_flash_attn_varlen_func, "qkv")

llama3_flash_attn_varlen_kvpacked_func = of_packed(llama3_flash_attn_varlen_func, "kv")
llama3_flash_attn_varlen_qkvpacked_func = of_packed(llama3_flash_attn_varlen_func, "qkv")
