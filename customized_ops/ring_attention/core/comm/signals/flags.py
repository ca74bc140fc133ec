"""Flags in the memory of GPUs of one host, and the watch over waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...triton_launch import Grid, Launch, launch_of
from .record import record_length

CHANNELS = 256
FLAG_BYTES = 8
MOST_RANKS = 63  # for each of which an int64 has a bit


def flags_bytes(ranks: int) -> int:
    """Bytes of the flags of one rank: a flag for each channel and peer."""
    return CHANNELS * ranks * FLAG_BYTES


class Flags:
    """The flags of the GPU ``device``, which is rank ``rank``. ``of_ranks``: each rank's memory for
    its flags, int64, zeros."""

    def __init__(self, of_ranks: Sequence[Tensor], rank: int, device: torch.device) -> None:
        if len(of_ranks) > MOST_RANKS:
            raise NotImplementedError(f"{len(of_ranks)} ranks; flags are for {MOST_RANKS}")
        from . import flag_kernels as kernels

        self._ranks, self._device = len(of_ranks), device
        self._grid = (self._ranks, 1, 1)
        record = torch.zeros(record_length(self._ranks), dtype=torch.int64, pin_memory=True)
        there = [t.data_ptr() + FLAG_BYTES * rank for t in of_ranks]
        here = [of_ranks[rank].data_ptr() + FLAG_BYTES * peer for peer in range(self._ranks)]
        self._there, self._here = (torch.tensor(t, device=device) for t in (there, here))
        self._record = record
        self.record: npt.NDArray[np.int64] = record.numpy()
        self._there_at, self._here_at = self._there.data_ptr(), self._here.data_ptr()
        self._record_at = record.data_ptr()
        self._put = self._compiled(kernels.put, self._there, record, 0, 0, 1)
        self._wait = self._compiled(kernels.wait, self._here, record, 0, 0, 1)
        self._mark = self._compiled(kernels.mark, record, 0)

    def _compiled(self, kernel: Any, *given: Any) -> Launch:
        """The kernel, compiled by a launch for no peers."""
        with torch.cuda.device(self._device):
            compiled = kernel[self._grid](*given, num_warps=1)
        return launch_of(compiled, self._device.index)

    def put(self, peers: Iterable[int], channel: int, call: int) -> None:
        """See :meth:`..one_sided.arena.Memory.signal`."""
        self._of_peers(self._put, self._there_at, peers, channel, call)

    def wait(self, peers: Iterable[int], channel: int, call: int) -> None:
        """See :meth:`..one_sided.arena.Memory.wait`."""
        self._of_peers(self._wait, self._here_at, peers, channel, call)

    def mark(self, passes: int) -> None:
        """Tell the host how many passes have ended, once all work before this is done."""
        self._launch(self._mark, (1, 1, 1), self._record_at, passes)

    def _of_peers(
        self, kernel: Launch, flags: int, peers: Iterable[int], channel: int, call: int
    ) -> None:
        bits = 0
        for peer in peers:
            bits |= 1 << peer
        offset = channel * self._ranks * FLAG_BYTES
        self._launch(kernel, self._grid, flags, self._record_at, bits, offset, call)

    def _launch(self, kernel: Launch, grid: Grid, *given: int) -> None:
        if torch._C._cuda_getDevice() == self._device.index:
            return kernel(grid, *given)
        with torch.cuda.device(self._device):
            return kernel(grid, *given)
