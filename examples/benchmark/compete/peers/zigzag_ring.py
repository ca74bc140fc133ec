"""Attention on a ring: causal, each rank with an early and a late chunk of 2 P, and full.

As in zhuzilin/ring-flash-attention (``zigzag_ring_flash_attn``): keys and values go around by NCCL
send and receive, each of P steps attends to the keys at hand, results are merged in fp32 by torch
ops, and the gradients of keys travel around with them in fp32. Full attention needs no halves: all
rows see all keys that pass by (its ``ring_flash_attn``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Form, Kernel
from .ring import Ring
from .scheme import Scheme, merged


class ZigzagRing(Scheme):
    """See the module. Tensors hold the early half of this rank's tokens, then the late one."""

    def __init__(self, kernel: Kernel, ring: Ring) -> None:
        self.kernel, self.ring = kernel, ring
        self.own, self.to_early, self.of_late = Form(causal=True), Form(False), Form(False)

    def sees_early(self, step: int) -> bool:
        """Whether the keys at hand are an earlier rank's, so that all rows see their early half. A
        later rank's keys are seen only by the late rows, which see all of them."""
        return step <= self.ring.rank

    def early(self, t: Tensor) -> Tensor:
        """The early half of the tokens, which are in dim 1."""
        return t[:, : t.shape[1] // 2]

    def late(self, t: Tensor) -> Tensor:
        """The late half."""
        return t[:, t.shape[1] // 2 :]

    def put_late(self, whole: Tensor, half: Tensor) -> None:
        """Write the late half of ``whole``."""
        self.late(whole).copy_(half)

    def add_early(self, whole: Tensor, half: Tensor) -> None:
        """Add to the early half of ``whole``."""
        self.early(whole).add_(half)

    def add_late(self, whole: Tensor, half: Tensor) -> None:
        """Add to the late half of ``whole``."""
        self.late(whole).add_(half)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        own_k, own_v, ring = k, v, self.ring
        for step in range(ring.size):
            arriving = ring.send((k, v)) if step + 1 < ring.size else None
            if step == 0:
                out, lse = self.kernel.forward(q, k, v, self.own)
                out = out.float()
            elif self.sees_early(step):
                part = self.kernel.forward(q, self.early(k), self.early(v), self.to_early)
                out, lse = merged(out, lse, *part)
            else:
                part = self.kernel.forward(self.late(q), k, v, self.of_late)
                late_out, late_lse = merged(self.late(out), self.late(lse), *part)
                self.put_late(out, late_out)
                self.put_late(lse, late_lse)
            if arriving is not None:
                k, v = arriving()
        out = out.to(q.dtype)
        return out, (q, own_k, own_v, out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ring, types = self.ring, (q.dtype, k.dtype, v.dtype)
        arriving = ring.send((k, v)) if ring.size > 1 else None
        grads = self.kernel.backward(dout, q, k, v, out, lse, self.own)
        dq, dk, dv = (g.to(torch.float32) for g in grads)
        returning = ring.send((dk, dv))
        for step in range(1, ring.size):
            assert arriving is not None
            k, v = arriving()
            if step + 1 < ring.size:
                arriving = ring.send((k, v))
            parts = self._part(step, dout, q, k, v, out, lse)
            dk, dv = returning()
            self._add(step, (dq, dk, dv), parts)
            returning = ring.send((dk, dv))
        dk, dv = returning()
        dq, dk, dv = (g.to(t) for g, t in zip((dq, dk, dv), types, strict=True))
        return dq, dk, dv

    def _part(
        self, step: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients from the keys at hand, with the shapes of the parts that attended."""
        if self.sees_early(step):
            k, v = self.early(k), self.early(v)
            return self.kernel.backward(dout, q, k, v, out, lse, self.to_early)
        dout, q, out = (self.late(t) for t in (dout, q, out))
        return self.kernel.backward(dout, q, k, v, out, self.late(lse), self.of_late)

    def _add(self, step: int, sums: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> None:
        dq, dk, dv = sums
        if self.sees_early(step):
            dq.add_(parts[0])
            self.add_early(dk, parts[1])
            self.add_early(dv, parts[2])
        else:
            self.add_late(dq, parts[0])
            dk.add_(parts[1])
            dv.add_(parts[2])


class FullRing(ZigzagRing):
    """All rows see all keys that pass by. bounds: of documents in the whole sequence, or None.
    Every rank holds a part of each document, as in the zigzag ring.
    """

    def __init__(
        self, kernel: Kernel, ring: Ring, bounds: tuple[int, ...] | None, device: torch.device
    ) -> None:
        super().__init__(kernel, ring)
        self.own = Form(causal=False)
        if bounds is not None:
            own = [b // ring.size for b in bounds]
            self.own = Form.packed(own, own, device, causal=False)
        self.to_early = self.own

    def sees_early(self, step: int) -> bool:
        return True

    def early(self, t: Tensor) -> Tensor:
        """All tokens: there are no halves."""
        return t
