"""Packed attention, causal or full, that gathers all keys, a few key heads at a time.

As in Llama 3 (arXiv:2407.21783, section 3.3.2) and zhuzilin/ring-flash-attention
(``llama3_flash_attn_varlen``): shards are contiguous, the next heads' keys are gathered while the
current ones attend, and the gradients of keys are summed by a reduce-scatter in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import Form, Kernel
from .scheme import Scheme


class Llama3AllGather(Scheme):
    """See the module.

    Args:
        stride: key heads gathered at a time; 0 for all.
        bounds: of the documents in the whole sequence.
        causal: whether a document's tokens see only those up to their own.
    """

    def __init__(
        self,
        kernel: Kernel,
        group: dist.ProcessGroup,
        stride: int,
        bounds: tuple[int, ...],
        device: torch.device,
        *,
        causal: bool,
    ) -> None:
        self.kernel, self.group, self.stride = kernel, group, stride
        rows = bounds[-1] // group.size()
        first, last = rows * group.rank(), rows * (group.rank() + 1)
        starts, stops = np.array(bounds[:-1]), np.array(bounds[1:])
        mine = (stops > first) & (starts < last)
        starts, stops = starts[mine], stops[mine]
        here = np.minimum(stops, last)
        seen = here if causal else stops
        self.keys = slice(int(starts[0]), int(seen[-1]))
        q_lengths, k_lengths = here - np.maximum(starts, first), seen - starts
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (q_lengths, k_lengths))
        self.form = Form.packed(cu_q, cu_k, device, causal=causal)

    def _gather(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Start gathering [1, l, heads, d] from all ranks; the returned function waits for it."""
        sent = [t.contiguous() for t in tensors]
        whole = [t.new_empty((t.shape[1] * self.group.size(), *t.shape[2:])) for t in sent]
        works = [
            dist.all_gather_into_tensor(w, t.squeeze(0), self.group, async_op=True)
            for w, t in zip(whole, sent, strict=True)
        ]

        def finish() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # kept until now: it was being read
            return [w[self.keys].unsqueeze(0) for w in whole]

        return finish

    def _steps(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """For each step: query heads, key heads, and their gathered keys and values."""
        stride, ratio = self.stride or k.shape[2], q.shape[2] // k.shape[2]
        heads = [slice(n, n + stride) for n in range(0, k.shape[2], stride)]
        arriving = self._gather(k[:, :, heads[0]], v[:, :, heads[0]])
        for n, own in enumerate(heads):
            keys, values = arriving()
            if n + 1 < len(heads):
                arriving = self._gather(k[:, :, heads[n + 1]], v[:, :, heads[n + 1]])
            yield slice(own.start * ratio, own.stop * ratio), own, keys, values

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        outs, lses = [], []
        for heads, _, keys, values in self._steps(q, k, v):
            out, lse = self.kernel.forward(q[:, :, heads], keys, values, self.form)
            outs.append(out)
            lses.append(lse)
        out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(lses))
        return out, (q, k, v, out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for heads, own, keys, values in self._steps(q, k, v):
            rows = (t[:, :, heads] for t in (dout, q))
            grads = self.kernel.backward(
                *rows, keys, values, out[:, :, heads], lse[heads], self.form
            )
            dq[:, :, heads] = grads[0]
            for home, grad in ((dk, grads[1]), (dv, grads[2])):
                whole = grad.new_zeros(
                    (home.shape[1] * self.group.size(), grad.shape[2], grad.shape[3])
                )
                whole[self.keys] = grad[0]
                mine = grad.new_empty((home.shape[1], *whole.shape[1:]))
                dist.reduce_scatter_tensor(mine, whole, group=self.group)
                home[0, :, own] = mine
        return dq, dk, dv
