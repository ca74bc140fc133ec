"""Tokens become heads and back: each rank does its share of the heads for all tokens of a group.

As in DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509): shards are contiguous, and q, k, v and
out each take an all-to-all. In USP (Fang and Zhao, arXiv:2405.07719) the group is a part of the
ranks, and rings go through all such parts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .scheme import Scheme


class Ulysses(Scheme):
    """See the module. inner: computes a share of the heads, with all of the group's tokens."""

    def __init__(self, group: dist.ProcessGroup, inner: Scheme) -> None:
        self.group, self.inner = group, inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = (to_heads(t, self.group) for t in (q, k, v))
        out, saved = self.inner.forward(q, k, v)
        return to_tokens(out, self.group), saved

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grads = self.inner.backward(to_heads(dout, self.group), *saved)
        dq, dk, dv = (to_tokens(g, self.group) for g in grads)
        return dq, dk, dv


def to_heads(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, own tokens, heads, ...] -> [1, tokens of all, own heads, ...]."""
    sent = t.squeeze(0).unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1).unsqueeze(0)


def to_tokens(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Back again."""
    sent = t.contiguous().squeeze(0).unflatten(0, (group.size(), -1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)
