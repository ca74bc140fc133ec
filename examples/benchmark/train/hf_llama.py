"""transformers' Llama with the weights of ours, and a loss without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import transformers
from shared.llama import Llama
from torch import Tensor, nn

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy

PARTS = {  # ours: theirs
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


class HfLlama(nn.Module):
    """A model whose ``forward`` takes what ``shard_batch`` gives and returns this rank's share of
    the loss."""

    def __init__(self, trunk: transformers.LlamaModel) -> None:
        super().__init__()
        self.trunk = trunk

    @classmethod
    def of(cls, ours: Llama) -> HfLlama:
        """A model that computes the same function as ``ours``."""
        c, weight = ours.c, ours.embed.weight
        trunk = transformers.LlamaModel(
            transformers.LlamaConfig(
                vocab_size=c.vocab,
                hidden_size=c.dim,
                intermediate_size=c.hidden,
                num_hidden_layers=c.layers,
                num_attention_heads=c.heads,
                num_key_value_heads=c.kv_heads,
                rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
                rms_norm_eps=1e-6,
                attn_implementation="seqshard",
            )
        ).to(weight)
        named = {"embed_tokens.weight": weight, "norm.weight": ours.norm.weight}
        for n, block in enumerate(ours.blocks):
            for our_name, name in PARTS.items():
                named[f"layers.{n}.{name}.weight"] = block.get_submodule(our_name).weight
        trunk.load_state_dict(named, strict=True)
        return cls(trunk)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.trunk.layers

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor, **others: Any
    ) -> Tensor:
        others.pop("labels")
        x = self.trunk(input_ids=input_ids, **others).last_hidden_state
        weight = self.trunk.embed_tokens.weight
        total = chunk_linear_cross_entropy(x, weight, shift_labels, reduction="sum")
        return total / num_items_in_batch
