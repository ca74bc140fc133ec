"""The zigzag ring over packed documents, each cut into 2 P chunks.

As in zhuzilin/ring-flash-attention (``zigzag_ring_flash_attn_varlen``): a rank holds the early and
the late chunk of every document, so every document's length is a multiple of 2 P, and halves are
picked by index.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .kernels import Form, Kernel
from .ring import Ring
from .zigzag_ring import ZigzagRing


class ZigzagVarlenRing(ZigzagRing):
    """See the module. bounds: of the documents in the whole sequence."""

    def __init__(
        self, kernel: Kernel, ring: Ring, bounds: tuple[int, ...], device: torch.device
    ) -> None:
        super().__init__(kernel, ring)
        own, half = (np.array(bounds) // (ring.size * n) for n in (1, 2))
        self.own = Form.packed(own, own, device, causal=True)
        self.to_early = Form.packed(own, half, device, causal=False)
        self.of_late = Form.packed(half, own, device, causal=False)
        halves = [(a + b) // 2 for a, b in pairwise(own)]
        early = np.concatenate([np.arange(a, b) for a, b in zip(own[:-1], halves, strict=True)])
        late = np.concatenate([np.arange(a, b) for a, b in zip(halves, own[1:], strict=True)])
        self._early = torch.from_numpy(early).to(device)
        self._late = torch.from_numpy(late).to(device)

    def early(self, t: Tensor) -> Tensor:
        return t.index_select(1, self._early)

    def late(self, t: Tensor) -> Tensor:
        return t.index_select(1, self._late)

    def put_late(self, whole: Tensor, half: Tensor) -> None:
        whole.index_copy_(1, self._late, half)

    def add_early(self, whole: Tensor, half: Tensor) -> None:
        whole.index_add_(1, self._early, half.to(whole.dtype))

    def add_late(self, whole: Tensor, half: Tensor) -> None:
        whole.index_add_(1, self._late, half.to(whole.dtype))
