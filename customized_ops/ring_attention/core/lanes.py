"""Two queues of GPU work: what needs nobody runs on one, what waits for peers on the other.

A GPU that finds no more blocks to start in one queue starts those of the other, so waiting for
peers, and the end of a kernel that fills the GPU no longer, cost nothing while there is other work.
The queue that waits for peers goes first: what it computes must still travel home.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

NOTHING: AbstractContextManager[None] = nullcontext()

# Whether a GPU takes the work of all streams in the order in which the host gives it, so that what
# waits holds up what comes after; CUDA reads this once, too.
ONE_QUEUE = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class Lanes:
    """The caller's stream and a second one beside it; on a CPU, or where one is enough, nothing.

    A tensor may be used on either between :meth:`fork` and :meth:`join` if it lives until then:
    the second stream starts after all that the first was given before, and the first goes on after
    all that the second was given.

    Attributes:
        two: whether there is a second one.
    """

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self.two = two and device.type == "cuda"
        if self.two:
            self._main = torch.cuda.current_stream(device)
            self._second = _beside(device, self._main.cuda_stream)

    def fork(self) -> None:
        """Let the second stream start."""
        if self.two:
            self._second.wait_stream(self._main)

    def second(self) -> AbstractContextManager[object]:
        """In this context work goes to the second stream."""
        return torch.cuda.stream(self._second) if self.two else NOTHING

    def join(self) -> None:
        """Let the first stream wait for the second."""
        if self.two:
            self._main.wait_stream(self._second)


@lru_cache(maxsize=64)
def _beside(device: torch.device, caller: int) -> torch.cuda.Stream:
    """Each of a caller's streams has its own, as their work is in no order. (torch deals streams
    out of a pool of 32, so a program with more of high priority may share one.)"""
    return torch.cuda.Stream(device, priority=-1)
