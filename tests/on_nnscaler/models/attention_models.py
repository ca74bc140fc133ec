"""Models whose attention is ours: every function that engines cut, and every kind of argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from customized_ops.ring_attention import (
    AttnMask,
    wrap_masked_attn_func,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
    wrap_zigzag_allgather_attn_varlen_func,
    wrap_zigzag_attn_func,
)

from ..support.jobs import Training

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 32, 16, 4, 2, 8, 16

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Any], Tensor]


class Attention(nn.Module):
    """``x: [b, l, DIM]``, or ``[l, DIM]`` where documents are packed."""

    def __init__(self, attend: Attend, kv_heads: int) -> None:
        super().__init__()
        self.attend, self.kv_heads = attend, kv_heads
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(DIM, kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(DIM, kv_heads * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        if attend in WITH_SINK:
            self.sink = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", torch.rand(HEADS))
        self.mask = AttnMask.prefix_lm(LENGTH, 5)  # nnscaler cannot trace its making

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        tokens = x.size()[:-1]
        q = self.q(x).view(*tokens, HEADS, HEAD_DIM)
        k = self.k(x).view(*tokens, self.kv_heads, HEAD_DIM)
        v = self.v(x).view(*tokens, self.kv_heads, HEAD_DIM)
        out = self.attend(self, q, k, v, cu_seqlens)
        return self.o(out.reshape(*tokens, HEADS * HEAD_DIM))


class Model(nn.Module):
    """``{"tokens": [b, l], "targets": [b, l], ("cu_seqlens")}`` to a mean cross entropy."""

    def __init__(self, attend: Attend, kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Attention(attend, kv_heads) for _ in range(2)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        x = self.embedding(sample["tokens"])
        for layer in self.layers:
            x = x + layer(x, sample["cu_seqlens"])
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, VOCAB), sample["targets"].view(-1))


def ring(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_func(q, k, v)


def ring_with_everything(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    out, lse = wrap_ring_attn_func(
        q, k, v, 0.3, alibi_slopes=m.slopes, window_size=(9, 0), sink=m.sink, softcap=8.0,
        return_lse=True, deterministic=True, reduce_dtype=torch.float64,
    )  # fmt: skip
    return out + torch.sigmoid(lse.transpose(1, 2)).unsqueeze(-1)


def ring_by_rows(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_func(q, k, v, alibi_slopes=m.slopes, q_rows=(0, 1))


def ring_with_a_group(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_func(q, k, v, process_group=(0, 5))


def zigzag(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_zigzag_attn_func(q, k, v, sink=m.sink)


def varlen(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_varlen_func(q, k, v, cu, cu, None, causal=True)


def varlen_by_rows(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_varlen_func(q, k, v, cu, cu, None, causal=True, q_rows=(0, 1))


def varlen_without_ring(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_varlen_func(q, k, v, cu, cu, None, enable_ring=False)


def window(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_sliding_window_attn_func(q, k, v, window_size=(5, 0))


def packed_window(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_sliding_window_attn_func(q, k, v, cu, cu, m.slopes, window_size=(5, 0))


def streaming(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_streaming_attn_func(q, k, v, 4, 2)


def packed_streaming(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_streaming_attn_func(q, k, v, 4, 2, cu_seqlens=cu)


def zigzag_allgather(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_zigzag_allgather_attn_varlen_func(q, k, v, cu, cu, None, causal=True)


def masked(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_masked_attn_func(q, k, v, m.mask, sink=m.sink)


def shuffled(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    """Moves that undo one another, and one that does not."""
    q = wrap_unshuffle_func(wrap_shuffle_func(q, "zigzag"), "zigzag")
    k = wrap_roll_func(k, 3)
    v = wrap_unshard_func(wrap_shard_func(v, "zigzag"), "zigzag")
    return wrap_ring_attn_func(q, k, v)


def shuffled_documents(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    q = wrap_maybe_unshuffle(wrap_maybe_shuffle(q, cu), cu)
    return wrap_ring_attn_varlen_func(q, k, v, cu, cu, None, causal=True)


# Calls as people write them: constants of every kind, values made while running, and mistakes.
SCALE = 1 / np.sqrt(8)
LENGTHS = [0, 8, 24, 32]  # of numpy's numbers nnscaler's tracer takes none but float64


def numpy_scale(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_func(q, k, v, SCALE)


def listed_lengths(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_varlen_func(q, k, v, LENGTHS, LENGTHS, None, causal=True)


def window_of_a_shape(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_func(q, k, v, window_size=(q.shape[1] // 4, 0))


def longest(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    most = int((cu[1:] - cu[:-1]).max())
    return wrap_ring_attn_varlen_func(
        q, k, v, cu, cu, None, causal=True, max_seqlen_q=most, max_seqlen_k=most
    )


def unsupported(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return wrap_ring_attn_func(q, k, v, return_attn_probs=True)


def both_kinds(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    packed = wrap_sliding_window_attn_func(q[0], k[0], v[0], [0, 16], [0, 16], window_size=(5, 0))
    return wrap_sliding_window_attn_func(q, k, v, window_size=(5, 0)) + packed


WITH_SINK = (ring_with_everything, zigzag, masked)
PACKED = (
    *(varlen, varlen_by_rows, varlen_without_ring),
    *(packed_window, packed_streaming, shuffled_documents, zigzag_allgather),
)


def _model(attend: Attend, kv_heads: int) -> nn.Module:
    torch.manual_seed(0)
    return Model(attend, kv_heads).double()


def model(attend: Attend, kv_heads: int = KV_HEADS) -> Callable[[], nn.Module]:
    return partial(_model, attend, kv_heads)


def single(attend: Attend) -> nn.Module:
    """In fp32."""
    return _model(attend, KV_HEADS).float()


def batch(seed: int) -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 2, LENGTH), generator=g)
    return {"sample": {"tokens": tokens, "targets": targets, "cu_seqlens": torch.tensor([0])}}


def packed_batch(seed: int) -> dict[str, dict[str, Tensor]]:
    """Three documents, of other lengths in every batch, each a multiple of 8."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 4 * LENGTH), generator=g)
    first = 8 + 8 * (seed % 3)
    cu = torch.tensor([0, first, first + 16, 4 * LENGTH], dtype=torch.int32)
    return {"sample": {"tokens": tokens, "targets": targets, "cu_seqlens": cu}}


def training(
    attend: Attend, policy: Any = "cp_follow", kv_heads: int = 2, **further: Any
) -> Training:
    """A model of this function, with batches that suit it."""
    batches = packed_batch if attend in PACKED else batch
    return Training(model(attend, kv_heads), batches, policy, **further)


def calls_of(code: str) -> list[str]:
    """The attention calls in generated code."""
    return re.findall(r"= customized_ops\S*_attn\w*\(.*\)", code)


def groups_of(code: str) -> set[tuple[int, ...]]:
    """The groups of these calls; () for a call without."""
    found = [re.search(r"process_group=\[([\d, ]+)\]", call) for call in calls_of(code)]
    return {tuple(map(int, m[1].split(","))) if m else () for m in found}
