"""Attention of a transformers model while its graph is captured, for ``parallelize``.

Nothing can be read from tensors then, so the graph itself finds the documents of a batch. Position
ids that no input reaches, as those that a model makes for itself, are known all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from ...op.arguments import ArgumentError
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from .pairs import Ints, Pairs, Rows, documents_of, find_pairs, on_host, segments_of
from .pattern import TITLE, Pattern


class _ReachedByInput(Exception):
    """A tensor depends on what the graph is called with."""


def attend(
    mask: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> Any:
    """q [b, l, h, d], k and v [b, l, g, d] -> [b, l, h, d], in a graph that is being captured.

    Args:
        mask: a :class:`.mask.Mask`. cu_seqlens: [documents + 1], of a batch of one.
    Raises:
        NotImplementedError: padding, a cache, or a sequence that is cut already.
    """
    _refuse(mask, q, k)
    pattern = mask.pattern
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ArgumentError(f"{TITLE}: cu_seq_lens_q goes with one row, got {q.shape[0]}")
        return _varlen(q, k, v, cu_seqlens[None], pattern, options)
    positions = pattern.position_ids if pattern.position_ids is not None else position_ids
    if positions is None or positions.ndim != 2 or not pattern.causal:
        return _static(mask, None).attend(q, k, v, **options)
    known = constant_value(positions)
    if known is not None:
        return _static(mask, known).attend(q, k, v, **options)
    if pattern.chunk:
        raise NotImplementedError(
            f"{TITLE}: chunks in a captured graph whose position_ids are an input are not "
            "supported; leave out position_ids"
        )
    return _varlen(q, k, v, cumulative(positions.expand(q.shape[0], -1)), pattern, options)


def _refuse(mask: Any, q: Tensor, k: Tensor) -> None:
    if mask.cut is not None:
        raise NotImplementedError(
            f"{TITLE}: a captured graph is cut by parallelize; call it outside sequence_parallel"
        )
    if mask.padding is not None:
        raise NotImplementedError(
            f"{TITLE}: attention_mask in a captured graph is not supported, since padding is not "
            "known then; leave it out (causal tokens never attend padding on the right, whose "
            "labels should be -100), or pack"
        )
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError(
            f"{TITLE}: {q.shape[1]} queries with {k.shape[1]} keys in a captured graph: a cache is "
            "not supported; pass use_cache=False"
        )


def _static(mask: Any, positions: Ints | None) -> Pairs:
    """The pairs where all is known: one document, or those of ``positions`` [b or 1, l]."""
    length, pattern = mask.q_len, mask.pattern
    documents = None if positions is None else documents_of(positions, None)
    if pattern.chunk and pattern.left_padding is not None:
        raise NotImplementedError(f"{TITLE}: chunks in a captured graph are not supported")
    segments, _ = segments_of(pattern, documents, positions, None, length)
    return find_pairs(pattern, Rows(length, length, segments=segments), mask.batch)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, pattern: Pattern, options: dict[str, Any]
) -> Tensor:
    """Each row of the batch by its documents; cu_seqlens [b, documents + 1]."""
    options |= {"causal": pattern.causal, "window_size": (pattern.left, pattern.right)}
    rows: Any = [
        wrap_ring_attn_varlen_func(q[n], k[n], v[n], cu, cu, **options)
        for n, cu in enumerate(cu_seqlens.unbind(0))
    ]
    return torch.stack(rows)


def cumulative(position_ids: Tensor) -> Tensor:
    """[b, l] -> [b, l + 1]: cumulative lengths of the documents, those at the end empty."""
    b, length = position_ids.shape
    at = torch.arange(1, length, device=position_ids.device)
    goes_on = position_ids[:, 1:] - position_ids[:, :-1] == 1
    starts = torch.where(goes_on, length, at).sort(dim=1).values
    first = torch.zeros((b, 1), dtype=starts.dtype, device=starts.device)
    return torch.cat([first, starts, torch.full_like(first, length)], dim=1)


def constant_value(tensor: Tensor) -> Ints | None:
    """The value of an integer tensor in a graph being captured, where no input reaches it."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    try:
        with _disable_current_modes(), torch.no_grad():
            return on_host(_evaluated(slot.proxy.node, {}))
    except _ReachedByInput:
        return None


def _evaluated(node: Node, known: dict[Node, Any]) -> Any:
    if node.op != "call_function" or isinstance(node.target, str):
        raise _ReachedByInput
    if node not in known:
        args = torch.fx.map_arg(node.args, lambda n: _evaluated(n, known))
        kwargs = torch.fx.map_arg(node.kwargs, lambda n: _evaluated(n, known))
        known[node] = node.target(*args, **kwargs)
    return known[node]
