"""Passes tensors around a ring of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Ring:
    """Every rank sends to the next one and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = group.rank(), group.size(), group
        ranks = dist.get_process_group_ranks(group)
        self._next = ranks[(self.rank + 1) % self.size]
        self._previous = ranks[(self.rank - 1) % self.size]

    def send(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start passing tensors on; the returned function waits for the incoming ones."""
        sent = [t.contiguous() for t in tensors]
        received = [torch.empty_like(t) for t in sent]
        ops = [dist.P2POp(dist.isend, t, self._next, self._group) for t in sent]
        ops += [dist.P2POp(dist.irecv, t, self._previous, self._group) for t in received]
        works = dist.batch_isend_irecv(ops)

        def finish() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # kept until now: it was being read
            return received

        return finish
