"""Tiny transformers models with recurrent layers; see ``api/test_hybrid_models.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from customized_ops.ring_attention.api import transformers as seqshard

VOCAB, LAYERS = 48, ["linear_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "layer_types": LAYERS,
}
QWEN = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "mlp_only_layers": [0, 1],
}
GRANITE = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3 next": (Qwen3NextConfig, Qwen3NextForCausalLM, QWEN),
    "granite 4": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GRANITE),
}


def tiny(name: str) -> nn.Module:
    """A model in fp64, of which HF computes gates, norms and angles in fp32."""
    seqshard.register()
    config, model_class, changed = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config(**{**SIZES, **changed})).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model
