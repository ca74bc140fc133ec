"""The Llama of the examples, written for one device.

Its attention calls a ``wrap_*_attn_func`` without a group, which an engine finds when it cuts the
model. Or it calls any function that it is given: code that cuts tokens itself passes one with a
group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy
from customized_ops.ring_attention import (
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_zigzag_attn_func,
)
from shared.text_corpus import VOCAB_SIZE, Batch

# From q [b, l, h, d], k and v [b, l, g, d] and the bounds of packed documents to [b, l, h, d].
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def ring(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Causal attention, tokens in their original order."""
    return wrap_ring_attn_func(q, k, v, causal=True)


def zigzag(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Causal attention, rows computed in zigzag order."""
    return wrap_zigzag_attn_func(q, k, v, causal=True)


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Causal attention inside each document of one packed row."""
    assert cu_seqlens is not None, "packed attention needs the documents' boundaries"
    rows = (t.squeeze(0) for t in (q, k, v))
    return wrap_ring_attn_varlen_func(*rows, cu_seqlens, cu_seqlens, causal=True).unsqueeze(0)


ATTENTION: dict[str, Attend] = {"ring": ring, "zigzag": zigzag, "varlen": varlen}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model, and how it computes.

    Attributes:
        op: the attention, by name or as a function.
        chunked: compute the loss without the logits of all tokens at once.
        checkpoint: keep only the inputs of blocks, and recompute the rest in the backward.
    """

    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 352
    vocab: int = VOCAB_SIZE
    rope_base: float = 10_000.0
    op: str | Attend = "ring"
    chunked: bool = False
    checkpoint: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (Su et al., arXiv:2104.09864): x [b, l, h, d], cos and sin [b, l, 1, d / 2]."""
    a, b = x.chunk(2, dim=3)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=3)


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.c, self.head_dim = c, c.head_dim
        self.attend = ATTENTION[c.op] if isinstance(c.op, str) else c.op
        self.wq = nn.Linear(c.dim, c.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(c.heads * self.head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        b, length, _ = x.shape
        q = rotate(self.wq(x).view(b, length, self.c.heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(b, length, self.c.kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(b, length, self.c.kv_heads, self.head_dim)
        return self.wo(self.attend(q, k, v, cu_seqlens).reshape(b, length, -1))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)
        self.attention = Attention(c)
        self.gate = nn.Linear(c.dim, c.hidden, bias=False)
        self.up = nn.Linear(c.dim, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cu_seqlens)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama with tied embeddings; ``forward`` returns the mean loss of its tokens."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.dim)
        steps = -torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        self.register_buffer("inv_freq", (c.rope_base**steps).float(), persistent=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        x, weight = self.hidden(tokens, position_ids, cu_seqlens), self.embed.weight
        if self.c.chunked:
            return chunk_linear_cross_entropy(x, weight, targets)
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    def hidden(
        self, tokens: Tensor, position_ids: Tensor, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """[b, l, dim], the hidden states; logits are their product with the embedding's weight."""
        angles = (position_ids.unsqueeze(-1) * self.inv_freq).unsqueeze(2)
        x = self.embed(tokens)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            if self.c.checkpoint:
                x = checkpoint(block, x, cos, sin, cu_seqlens, use_reentrant=False)
            else:
                x = block(x, cos, sin, cu_seqlens)
        return self.norm(x)


def inputs(batch: Batch, op: str) -> dict[str, Tensor]:
    """The arguments of ``forward``."""
    given = {n: getattr(batch, n) for n in ("tokens", "targets", "position_ids")}
    return {**given, "cu_seqlens": batch.cu_seqlens} if op == "varlen" else given
