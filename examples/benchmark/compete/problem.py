"""The tensors of a case, whole and cut."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.contestant import Contestant
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout


class Problem:
    """q, k, v and dout of a case, the same on every rank, and shards of them.

    Contestants with the same layout share their shards.
    """

    def __init__(self, case: Case, ranks: Ranks, dtype: torch.dtype, seed: int) -> None:
        self.case, self.ranks = case, ranks
        source = torch.Generator(ranks.device).manual_seed(seed)
        (h, g), d = case.heads, case.head_dim
        self.whole = tuple(
            torch.randn(
                (1, case.tokens, heads, d), generator=source, device=ranks.device, dtype=dtype
            )
            for heads in (h, g, g, h)
        )
        self._shards: dict[Layout, tuple[Tensor, ...]] = {}

    def layout(self, contestant: Contestant) -> tuple[Layout, int]:
        """The layout of a contestant, and this rank's number in it."""
        layout = contestant.layout(self.case, self.ranks.size)
        return layout, 0 if contestant.whole else self.ranks.rank

    def shards(self, contestant: Contestant) -> tuple[Tensor, ...]:
        """q, k and v, which need gradients, and dout, as the contestant's ranks hold them."""
        layout, rank = self.layout(contestant)
        if layout not in self._shards:
            *inputs, dout = (layout.shard(t, rank).contiguous() for t in self.whole)
            leaves = (t.detach().requires_grad_() for t in inputs)
            self._shards[layout] = (*leaves, dout)
        return self._shards[layout]

    def local_bytes(self, contestant: Contestant) -> int:
        """Bytes of q, k, v and out on this rank."""
        q, k, v, _ = self.shards(contestant)
        return sum(t.nbytes for t in (q, k, v, q))
