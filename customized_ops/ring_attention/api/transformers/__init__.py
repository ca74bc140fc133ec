"""Attention for Hugging Face transformers models: ``attn_implementation="seqshard"``.

    register()
    model = LlamaForCausalLM.from_pretrained(name, attn_implementation="seqshard")

Every mask that transformers builds from causality, windows, chunks, documents and padding is
supported as it is, without a dense mask; so are softcaps, sinks and dropout. Anything else that a
model asks for is an error that names it. Three ways to run:

    one device          like any implementation, including ``generate`` with its cache
    sharded by hand     shard_batch(batch, group), and the model inside its context()
    by the engine       parallelize(model, batch, "cp", config)

.. include:: ../../docs/transformers.md
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...op.arguments import ArgumentError, checked
from ...op.tokens.lengths import on_host
from ..peer_calls import NOT_ABOUT_ATTENTION
from . import mixers, traced
from .cut import Cut, current_cut, refuse_part, sequence_parallel
from .mask import Mask, is_traced, leave_documents_to_cut, make_mask, maskless
from .mask_function import TITLE
from .shard import Shard, shard_batch, sum_gradients, sum_over_ranks

__all__ = [
    "Cut",
    "Shard",
    "register",
    "sequence_parallel",
    "shard_batch",
    "sum_gradients",
    "sum_over_ranks",
]

IMPLEMENTATION = "seqshard"

HARMLESS = {*NOT_ABOUT_ATTENTION, "shift_labels", "logits_to_keep", "seq_idx"}
HARMLESS |= {"max_length_q", "max_length_k"}


def register() -> None:
    """Make ``"seqshard"`` known to transformers, as an attention and as a mask implementation.

    Call it once, before a model is made or ``set_attn_implementation("seqshard")`` is called.

    Raises:
        ImportError: transformers is not installed, or older than 5.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register() needs transformers 5 or newer: pip install 'seqshard[hf]'"
        ) from error
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, model_mask)
    leave_documents_to_cut()


@torch.compiler.disable
def model_mask(*args: Any, **kwargs: Any) -> Mask:
    """The mask function that transformers calls, before it runs a model's layers."""
    mixers.route()
    mask = make_mask(*args, **kwargs)
    mask.positions_of_model = traced.positions_of_model()
    return mask


# Types of layers in which nothing but attention mixes tokens.
TOKEN_BY_TOKEN = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}


@torch.compiler.disable  # plans are made on the host; the layers around it compile
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls.

    Args:
        query: [b, h, l, d]. key: [b, g, m, d], value: [b, g, m, e].
        attention_mask: a :class:`.mask.Mask`, or None for models that make no mask.
        s_aux: [h], sinks: logits that join the softmax with no value.
    Returns:
        [b, l, h, e], and None for the weights, which are never made.
    Raises:
        NotImplementedError, ValueError: a requested feature is not supported; the message names it.
    """
    q, k, v = (_as_autocast(t).transpose(1, 2) for t in (query, key, value))
    cut = attention_mask.cut if isinstance(attention_mask, Mask) else current_cut()

    def check() -> tuple[Mask, Tensor | None]:
        _refuse(module, attention_mask, others)
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = maskless(q, k, causal, sliding_window)
        else:
            mask = attention_mask
            _check_window(mask, sliding_window)
        if mask.cut is None:
            refuse_part(position_ids, others.get("num_items_in_batch"))
            _refuse_other_cut(module)
        elif not mask.model_is_known:
            _refuse_for_parts(module, others)
            mask.model_is_known = True
        return mask, _same_documents(cu_seq_lens_q, cu_seq_lens_k)

    mask, cu_seqlens = checked(TITLE, None if cut is None else cut.group, check)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "dropout_p": dropout,
        "sink": s_aux,
    }
    if is_traced(q):
        documents = position_ids, cu_seqlens
        recurrent = mixers.has_recurrence(module)
        traced.refuse_documents(mask, *documents, _mixing_layers(module), recurrent)
        return traced.attend(mask, q, k, v, *documents, **options), None
    of_batch = mask.batch_mask(q, k, position_ids, cu_seqlens)
    if mask.cut is not None:
        options |= mask.cut.options(module, dropout)
    return of_batch.attend(q, k, v, **options), None


def _as_autocast(t: Tensor) -> Tensor:
    """Cast to autocast's dtype, as torch casts inputs of ``scaled_dot_product_attention``."""
    if t.dtype != torch.float32 or not torch.is_autocast_enabled(t.device.type):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _refuse_other_cut(module: torch.nn.Module) -> None:
    """Raise if accelerate cuts the sequence for an attention other than this one."""
    for hook in module._forward_pre_hooks.values():
        if "context_parallel" in getattr(hook, "__qualname__", ""):
            raise ArgumentError(
                f"{TITLE}: accelerate cuts sequences for torch's own context parallelism, so each "
                "rank would attend its own tokens alone; with the Trainer put ContextParallel "
                "first in the bases of its class, else call use_seqshard before prepare"
            )


def _refuse_for_parts(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise if a model cannot run on a part of the tokens, because its loss is not a sum over
    tokens, or because a layer without attention mixes them."""
    config = getattr(module, "config", None)
    if others.get("output_router_logits") or getattr(config, "output_router_logits", False):
        raise NotImplementedError(
            f"{TITLE}: output_router_logits: the loss that balances experts is not a sum over "
            "tokens, so a rank's part of them does not give its share; set it to False"
        )
    if alone := _mixing_layers(module):
        raise NotImplementedError(
            f"{TITLE}: the model has layers of type {', '.join(alone)}, which would mix only the "
            "tokens of each rank; models are cut by hand where attention, the gated delta rule and "
            "Mamba-2 alone mix tokens"
        )


def _mixing_layers(module: torch.nn.Module) -> list[str]:
    """Types of the model's layers that mix tokens in a way that is not known here."""
    known = TOKEN_BY_TOKEN | (mixers.LAYER_TYPES if mixers.is_routed(module) else set())
    return sorted(set(getattr(getattr(module, "config", None), "layer_types", None) or ()) - known)


def _refuse(module: torch.nn.Module, attention_mask: Any, others: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise NotImplementedError(
            f"{TITLE}: attention_mask is {type(attention_mask).__name__} {shape}, made by the "
            "model or its caller, which cannot be expressed as windows, documents and padding; "
            "pass a 2-dimensional attention_mask, or use attn_implementation='eager' or 'sdpa'"
        )
    config = getattr(module, "config", None)
    if others.pop("output_attentions", None) or getattr(config, "output_attentions", False):
        raise NotImplementedError(
            f"{TITLE}: output_attentions: the weights are never made; use "
            "attn_implementation='eager'"
        )
    for name, value in others.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise NotImplementedError(
                f"{TITLE}: {type(module).__name__} passes {name}, which is not supported"
            )


def _check_window(mask: Mask, sliding_window: int | None) -> None:
    left = mask.description.left
    if sliding_window is not None and left not in (sliding_window - 1, sliding_window):
        shown = "none" if left < 0 else f"{left} keys before a token's own"
        raise ArgumentError(
            f"{TITLE}: the layer asks for sliding_window={sliding_window}, but the window of its "
            f"mask is {shown}"
        )


def _same_documents(cu_q: Tensor | None, cu_k: Tensor | None) -> Tensor | None:
    if cu_k is None or cu_q is cu_k:  # keys have the queries' documents
        return cu_q
    if cu_q is None or cu_q.shape != cu_k.shape:
        raise ArgumentError(
            f"{TITLE}: give cu_seq_lens_q, and if also cu_seq_lens_k, of the same documents"
        )
    # In a captured graph neither can be read; collators make them equal.
    if not is_traced(cu_q) and not np.array_equal(on_host(cu_q), on_host(cu_k)):
        raise NotImplementedError(
            f"{TITLE}: documents whose queries and keys differ in length (cu_seq_lens_q and "
            "cu_seq_lens_k) are not supported"
        )
    return cu_q
