"""Batches of packed documents, a model with two kinds of op of ours, and ways to write a call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from customized_ops import ring_attention
from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy
from on_nnscaler.models import attention_models as models
from on_nnscaler.models import helper_calls
from on_nnscaler.models.attention_models import training
from on_nnscaler.support import jobs


def packed_training(attend: Any, policy: Any = "cp_follow", **further: Any) -> jobs.Training:
    job = training(attend, policy, **further)
    return jobs.Training(job.model, models.packed_batch, policy, **further)


def short_batch(seed: int) -> dict[str, dict[str, Tensor]]:
    sample = models.packed_batch(seed)["sample"]
    return {"sample": {n: x[:32] if n != "cu_seqlens" else x for n, x in sample.items()}}


class WithBoth(nn.Module):
    """Attention, and the chunked loss at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCAB, models.DIM)
        self.attention = models.Attention(models.ring, 2)
        self.head = nn.Parameter(torch.randn(models.VOCAB, models.DIM))

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        x = self.embedding(sample["tokens"])
        x = F.silu(x + self.attention(x, None))
        return chunk_linear_cross_entropy(x, self.head, sample["targets"], chunk_size=5)


def with_both() -> nn.Module:
    torch.manual_seed(0)
    return WithBoth().double()


# Calls that are not a name of the model's module.
SCALED = partial(ring_attention.wrap_ring_attn_func, softmax_scale=0.3)
BY_NAME = {"ring": ring_attention.wrap_ring_attn_func}


def through_its_package(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return ring_attention.wrap_ring_attn_func(q, k, v)


def packed_through_its_package(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return ring_attention.wrap_ring_attn_varlen_func(q, k, v, cu, cu, None, causal=True)


def in_a_helper(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return helper_calls.attend(q, k, v)


def packed_in_a_helper(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return helper_calls.attend_packed(q, k, v, cu)


def of_a_partial(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return SCALED(q, k, v, causal=False)


def of_a_table(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return BY_NAME["ring"](q, k, v)


def mapped(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    (out,) = map(ring_attention.wrap_ring_attn_func, [q], [k], [v])
    return out


def no_attention(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu: Any) -> Tensor:
    return F.silu(q)
