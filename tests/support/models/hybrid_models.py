"""Tiny transformers models with recurrent layers; for ``api/transformers``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
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
}
QWEN = {
    "layer_types": LAYERS,
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "mlp_only_layers": [0, 1],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
GRANITE = {
    **MAMBA,
    "layer_types": LAYERS,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 8,
    "chunk_size": 8,
}
FALCON = {**MAMBA, "mamba_d_ssm": 64}
BAMBA = {**MAMBA, "attn_layer_indices": [1]}
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"],
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "chunk_size": 8,
    "num_mem_blocks": 1,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3 next": (Qwen3NextConfig, Qwen3NextForCausalLM, QWEN),
    "granite 4": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, GRANITE),
    "granite 4, rope": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {**GRANITE, "position_embedding_type": "rope"},
    ),
    "nemotron h": (NemotronHConfig, NemotronHForCausalLM, NEMOTRON),
    "bamba": (BambaConfig, BambaForCausalLM, BAMBA),
    "zamba 2": (Zamba2Config, Zamba2ForCausalLM, ZAMBA),
    "falcon h1": (FalconH1Config, FalconH1ForCausalLM, FALCON),
}


class _Wide(ModuleType):
    """torch, whose fp32 is fp64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[None]:
    """What a model's file casts to fp32, norms, gates, angles, losses, it casts to fp64 in here."""
    modeling = sys.modules[type(model).__module__]
    with (
        patch.object(modeling, "torch", _Wide("torch")),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def tiny(name: str) -> nn.Module:
    """A model in fp64, all of which it is :func:`in_fp64`."""
    seqshard.register()
    config, model_class, changed = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config(**{**SIZES, **changed})).double()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model
