"""torchtitan's inner attentions on one device, with the signatures of torchtitan 0.3.0.

These are plain PyTorch in any precision, whereas torchtitan's own call GPU kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VarlenMetadata(NamedTuple):
    """Where documents begin and end in the rows of a batch, one row after the other."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    cu_seq_q_host: tuple[int, ...] | None = None


class ScaledDotProductAttention(nn.Module):
    """Causal attention of each row; tensors are [b, l, h, d], and keys may have fewer heads."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        rows = (t.transpose(1, 2) for t in (q, k, v))
        options = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(*rows, **options).transpose(1, 2)


class VarlenAttention(ScaledDotProductAttention):
    """Causal attention within documents, computed here one document after the other."""

    window_size = (-1, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: VarlenMetadata, **kwargs: Any
    ) -> Tensor:
        lengths = attention_masks.cu_seq_q.diff().tolist()
        split = (t.flatten(0, 1)[None].split(lengths, 1) for t in (q, k, v))
        outs = [
            super(VarlenAttention, self).forward(*qkv, **kwargs) for qkv in zip(*split, strict=True)
        ]
        return torch.cat(outs, 1).view(*q.shape[:3], v.shape[-1])
