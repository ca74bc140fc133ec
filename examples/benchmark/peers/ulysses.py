"""Tokens become heads and back: each rank attends the whole sequence with its share of heads.

As in DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509): shards are contiguous, and q, k, v and
out each take an all-to-all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import Form, Kernel


class Ulysses:
    """See the module. form: of the whole sequence."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup, form: Form) -> None:
        self.kernel, self.group, self.form = kernel, group, form

    def _to_heads(self, t: Tensor) -> Tensor:
        """[1, tokens of all, own heads, d] of [1, own tokens, heads, d]."""
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
        out, lse = self.kernel.forward(q, k, v, self.form)
        return self._to_tokens(out), (q, k, v, out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~.scheme.Scheme`."""
        dout = self._to_heads(dout)
        grads = self.kernel.backward(dout, q, k, v, out, lse, self.form)
        dq, dk, dv = (self._to_tokens(g) for g in grads)
        return dq, dk, dv
