"""Tiny transformers models from configs, and batches for them; see ``api/transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from customized_ops.ring_attention.api import transformers as seqshard

ROWS, TOKENS, VOCAB = 3, 22, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FULL_THEN_WINDOW = ["full_attention", "sliding_attention"]
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 5}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
MODELS: dict[str, tuple[type, type, Mapping[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama dropout": (LlamaConfig, LlamaForCausalLM, {"attention_dropout": 0.4}),
    "llama both ways": (LlamaConfig, LlamaForCausalLM, {"is_causal": False}),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": FULL_THEN_WINDOW,
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 5}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {**GEMMA, "attn_logit_softcapping": 0.2}),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, {"head_dim": 8, "sliding_window": 6, **EXPERTS}),
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {"head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 40, **EXPERTS},
    ),
}
# sdpa has no softcap and no sinks.
BY_EAGER = ("gemma2", "gpt-oss", "llama both ways")


def tiny(name: str, layers: int = 2, std: float = 0.3, **others: int) -> nn.Module:
    """A model in fp64 (HF's norms, angles and loss stay fp32), with large weights.

    ``others``: sizes in place of those above.
    """
    seqshard.register()
    config, model_class, changed = MODELS[name]
    torch.manual_seed(0)
    sizes = SIZES | dict(changed) | {"num_hidden_layers": layers} | others
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][-layers:]
    model = model_class(config(**sizes)).double()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # so that scores differ, and with them what masks leave out
            nn.init.normal_(parameter, std=std)
        elif "sinks" in parameter_name:
            nn.init.normal_(parameter)
    return model


def batch(case: str, rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    """A batch whose rows differ in their documents or their padding."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (rows, tokens), generator=g)
    labels = ids.clone()
    labels[:, : tokens // 2] = -100  # unevenly over ranks
    given = {"input_ids": ids, "labels": labels}
    if case == "packed":
        cuts = [[5, tokens - 5], [tokens], [1, 8, tokens - 9]][:rows]
        given["position_ids"] = torch.stack(
            [torch.cat([torch.arange(length) for length in lengths]) for lengths in cuts]
        )
    elif case != "plain":
        attended = torch.ones(rows, tokens, dtype=torch.int64)
        attended[0, 14:] = attended[2, 9:] = 0
        if case == "padded left":
            attended = attended.flip(1)
        elif case == "padded inside":
            attended[1, 3] = 0
        given["attention_mask"] = attended
        given["labels"] = labels.where(attended == 1, -100)
    return given


def run(model: nn.Module, implementation: str, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Loss, logits and every gradient of a forward without a cache."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**{"use_cache": False, **given})
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients(model)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
