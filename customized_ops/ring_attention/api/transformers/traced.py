"""Attention of a transformers model while its graph is captured, for ``parallelize``.

Values of tensors cannot be read then, so the graph itself finds the documents of a batch. Position
ids that depend on no input, such as those that a model makes itself, are known nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from ...core.arrays import Ints
from ...op.arguments import ArgumentError
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from .batch_mask import BatchMask, BatchTokens, batch_mask, begins, host_copy
from .calling_modules import calling_modules
from .mask import Mask, is_traced
from .mask_function import TITLE


class _ReachedByInput(Exception):
    """A tensor depends on an input of the graph."""


def attend(
    mask: Mask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> Any:
    """q [b, l, h, d], k and v [b, l, g, d] -> [b, l, h, d], in a graph that is being captured.

    Args:
        cu_seqlens: [documents + 1], for a batch of one.
    Raises:
        NotImplementedError: padding, a cache, or a sequence that is cut already.
    """
    _refuse(mask, q, k)
    description = mask.description
    window = description.left, description.right
    windowed = options | {"causal": description.causal, "window_size": window}
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ArgumentError(f"{TITLE}: cu_seq_lens_q goes with one row, got {q.shape[0]}")
        return _by_documents(q, k, v, [cu_seqlens], **windowed)
    positions = _of_documents(mask, mask.position_ids(position_ids))
    known = None if positions is None else constant_value(positions)
    if positions is None or known is not None:
        return _of_known(mask, known).attend(q, k, v, **options)
    if description.chunk:
        raise NotImplementedError(
            f"{TITLE}: chunks in a captured graph whose position_ids are an input are not "
            "supported; leave out position_ids"
        )
    lengths = cumulative(positions.expand(q.shape[0], -1))
    return _by_documents(q, k, v, lengths.unbind(0), **windowed)


def _refuse(mask: Mask, q: Tensor, k: Tensor) -> None:
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


def refuse_documents(
    mask: Mask,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    unknown: Sequence[str],
    recurrent: bool,
) -> None:
    """Raise for documents that some layers would not keep apart.

    Args:
        unknown: types of layers that mix tokens in ways that are not known here.
        recurrent: whether there are layers that read cu_seqlens and not position_ids.
    Raises:
        ArgumentError: cu_seqlens must be given. NotImplementedError: the layers cannot be told.
    """
    given = mask.position_ids(position_ids)
    positions = _of_documents(mask, mask.positions_of_model if given is None else given)
    known = None if positions is None else constant_value(positions)
    may_begin = positions is not None and (known is None or begins(known, None).any())
    if unknown and (may_begin or cu_seqlens is not None):
        raise NotImplementedError(
            f"{TITLE}: the model has layers of type {', '.join(unknown)}, which do not keep "
            "documents apart; for rows of one document leave position_ids and cu_seq_lens_q out"
        )
    if may_begin and cu_seqlens is None and (recurrent or given is None):
        may = "are an input, which may begin" if known is None else "begin"
        blind = "recurrent layers do not look at" if recurrent else "attention is not shown"
        raise ArgumentError(
            f"{TITLE}: position_ids {may} documents, and the model's {blind} them; give "
            "cu_seq_lens_q and cu_seq_lens_k, too, or for rows of one document leave position_ids "
            "out"
        )


def _of_documents(mask: Mask, positions: Tensor | None) -> Tensor | None:
    """The positions, if they may mark documents: 2-dimensional, and with a causal mask."""
    rows = positions is not None and positions.ndim == 2
    return positions if rows and mask.description.causal else None


def positions_of_model() -> Tensor | None:
    """The position_ids of the model that makes a mask, while its graph is captured. They are taken
    from the innermost module that has some."""
    every = (given.get("position_ids") for _, given in calling_modules())
    found = next((each for each in every if isinstance(each, Tensor)), None)
    return found if found is not None and is_traced(found) else None


def _of_known(mask: Mask, positions: Ints | None) -> BatchMask:
    """The mask if documents are known: one, or those of ``positions`` [b or 1, l]."""
    if mask.description.chunk and mask.description.left_padding is not None:
        raise NotImplementedError(f"{TITLE}: chunks in a captured graph are not supported")
    tokens = BatchTokens.of_positions(mask.q_len, positions)
    return batch_mask(mask.description, tokens, mask.batch)


def _by_documents(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[Tensor], **options: Any
) -> Tensor:
    """Attention of each row of the batch, by the cumulative lengths of its documents."""
    rows: Any = [
        wrap_ring_attn_varlen_func(q[n], k[n], v[n], cu, cu, **options)
        for n, cu in enumerate(lengths)
    ]
    return torch.stack(rows)


def cumulative(position_ids: Tensor) -> Tensor:
    """[b, l] -> [b, l + 1]: cumulative lengths of the documents, padded with empty ones."""
    b, length = position_ids.shape
    at = torch.arange(1, length, device=position_ids.device)
    goes_on = position_ids[:, 1:] - position_ids[:, :-1] == 1
    starts = torch.where(goes_on, length, at).sort(dim=1).values
    first = torch.zeros((b, 1), dtype=starts.dtype, device=starts.device)
    return torch.cat([first, starts, torch.full_like(first, length)], dim=1)


def constant_value(tensor: Tensor) -> Ints | None:
    """The value of an integer tensor in a graph being captured; None if it depends on an input."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    try:
        with _disable_current_modes(), torch.no_grad():
            return host_copy(_evaluated(slot.proxy.node, {}))
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
