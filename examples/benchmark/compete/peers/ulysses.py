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


class Ulysses:
    """See the module. inner: computes a share of the heads, with all of the group's tokens."""

    def __init__(self, group: dist.ProcessGroup, inner: Scheme) -> None:
        self.group, self.inner = group, inner

    def _to_heads(self, t: Tensor) -> Tensor:
        """[1, own tokens, heads, d] -> [1, tokens of all, own heads, d]."""
        size = self.group.size()
        sent = t.squeeze(0).unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.flatten(0, 1).unsqueeze(0)

    def _to_tokens(self, t: Tensor) -> Tensor:
        """Back again."""
        sent = t.contiguous().squeeze(0).unflatten(0, (self.group.size(), -1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`~.scheme.Scheme`."""
        q, k, v = (self._to_heads(t) for t in (q, k, v))
        out, saved = self.inner.forward(q, k, v)
        return self._to_tokens(out), saved

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~.scheme.Scheme`."""
        grads = self.inner.backward(self._to_heads(dout), *saved)
        dq, dk, dv = (self._to_tokens(g) for g in grads)
        return dq, dk, dv
