"""Models of transformers over the ranks of a group, as in ring_flash_attn; see its table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, comm_by_name
from ...op.arguments import ArgumentError, checked, is_integer, require
from ...op.tokens.lengths import CuSeqlens, as_tensor, check_cu_seqlens, on_host
from ..peer_calls import NOT_ABOUT_ATTENTION
from .calls import comm_of
from .llama3 import by_key_heads

TITLE = "ring_flash_attn in transformers"
IMPLEMENTATION = "flash_attention_2"

HARMLESS = {*NOT_ABOUT_ATTENTION, "position_ids", "layer_idx"}


@dataclass
class Settings:
    """Arguments of the two functions below, which models do not pass to their layers.

    Attributes:
        group: name of the group of ``substitute_hf_flash_attn``; None before that is called.
        documents: cumulative lengths over all ranks from ``update_ring_flash_attn_params``, and
            the group that they are for; None before that is called.
    """

    group: str | None = None
    heads_k_stride: int = 1
    documents: tuple[npt.NDArray[np.int64], str] | None = None


_settings = Settings()


def substitute_hf_flash_attn(process_group: GroupLike, heads_k_stride: int) -> None:
    """Make every model of transformers whose attention is "flash_attention_2" attend over a group.

    Each rank runs the model on its tokens: one row of packed documents, cut contiguously, with the
    position ids of those tokens. Loading a model with that attention still needs flash_attn
    installed; running it does not.

    Args:
        process_group: the ranks over which a sequence is cut; None is the world.
        heads_k_stride: how many key heads are attended at a time.
    Raises:
        ArgumentError: ``heads_k_stride`` is not positive, or there is no group.
        ImportError: transformers 5 or newer is not installed.
    """
    from transformers import AttentionInterface

    title = "substitute_hf_flash_attn"
    comm = comm_of(title, process_group)
    require(is_integer(heads_k_stride, 1), title, "heads_k_stride", "positive", heads_k_stride)
    _settings.group, _settings.heads_k_stride = comm.name, int(heads_k_stride)
    AttentionInterface.register(IMPLEMENTATION, attention)


def update_ring_flash_attn_params(cu_seqlens: CuSeqlens, process_group: GroupLike) -> None:
    """Set the documents on which the following forwards, and their backwards, run.

    Args:
        cu_seqlens: [documents + 1] of the whole sequence, the same on every rank.
        process_group: that of :func:`substitute_hf_flash_attn`.
    Raises:
        ArgumentError: ``cu_seqlens`` do not start at 0, or fall.
    """
    title = "update_ring_flash_attn_params"
    comm = comm_of(title, process_group)

    def check() -> npt.NDArray[np.int64]:
        cu = on_host(as_tensor(title, "cu_seqlens", cu_seqlens))
        check_cu_seqlens(title, "cu_seqlens", cu)
        return cu

    _settings.documents = checked(title, comm, check), comm.name


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``1 h l d, 1 g l d, 1 g l d -> 1 l h d``: what transformers calls in each attention layer.

    Raises:
        ArgumentError: see the last paragraph of the table in ``ring_flash_attn``.
    """
    assert _settings.group is not None, "registered by substitute_hf_flash_attn"
    comm = comm_by_name(_settings.group)
    others = {name: value for name, value in others.items() if name not in HARMLESS}
    others["attention_mask"] = attention_mask
    documents = checked(TITLE, comm, lambda: _documents(comm, query, key, others))
    reach = -1 if sliding_window is None else sliding_window - 1  # it counts the token itself
    if deterministic is None:  # transformers' switch decides
        deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    out = by_key_heads(
        TITLE,
        _settings.heads_k_stride,
        (q, k, v),
        documents,
        comm,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=bool(module.is_causal if is_causal is None else is_causal),
        window_size=(reach, reach),
        softcap=softcap or 0.0,
        sink=s_aux,
        deterministic=deterministic,
    )
    return out.unsqueeze(0), None


def _documents(
    comm: Comm, query: Tensor, key: Tensor, others: dict[str, Any]
) -> npt.NDArray[np.int64]:
    """``cu_seqlens`` of all ranks, after checking that the call asks for nothing unsupported."""
    if _settings.documents is None or _settings.documents[1] != comm.name:
        raise ArgumentError(
            f"{TITLE}: before the model runs, update_ring_flash_attn_params must be given "
            "the documents and the group of substitute_hf_flash_attn"
        )
    if query.shape[0] != 1:
        raise ArgumentError(
            f"{TITLE}: documents are packed in one row, but query is of shape {tuple(query.shape)}"
        )
    if key.shape[2] != query.shape[2]:
        raise ArgumentError(
            f"{TITLE}: query has {query.shape[2]} tokens and key {key.shape[2]}; a KV cache with "
            "earlier tokens is not cut over ranks, so generate without this attention"
        )
    asked = sorted(
        name for name, value in others.items() if value is not None and value is not False
    )
    if asked:
        raise ArgumentError(
            f"{TITLE}: {', '.join(asked)} cannot be honoured; the documents of "
            "update_ring_flash_attn_params say which tokens attend, so leave out padding"
        )
    return _settings.documents[0]
