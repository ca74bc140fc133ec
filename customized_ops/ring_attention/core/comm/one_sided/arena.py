"""Memory of every rank of a group that its peers write to, and tensors in it, at the same places on
every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

ALIGNED_BYTES = 256
# What an arena that is too small grows by at the least, in parts of what it has. Each growth waits
# for all ranks, so there must be few of them, however lengths change: by the logarithm of the
# largest need.
GROWTH = 0.5
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Piece:
    """Some memory of every rank."""

    of_ranks: list[Tensor]  # uint8[n], in rank order
    holder: object  # what keeps the memory; tensors do not

    def __len__(self) -> int:
        return len(self.of_ranks[0])


class Memory(Protocol):
    """Memory of every rank of a group that all of them can write to."""

    channels: int  # how many there are for signals, the same on every rank

    def allocate(self, n_bytes: int) -> Piece:
        """New memory. All ranks call this together; it returns when no rank has work under way."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is on the device that the memory is on."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, which will use the memory of now for ever."""

    def name(self, call: int, what: str) -> None:
        """``what`` is the pass with the fingerprint ``call``, for errors."""

    def check(self, what: str) -> None:
        """``what`` is next.

        Raises:
            PeerFailed: a wait has ended in an error that nobody has seen yet.
        """

    def signal(self, peers: Sequence[int], channel: int, call: int) -> None:
        """Set the flag of each peer for this rank and channel to the fingerprint ``call``, once it
        is clear; after all that this rank's stream was given before."""

    def wait(self, peers: Sequence[int], channel: int, call: int) -> None:
        """Wait until each peer has set the flag here, and clear it. Work that follows fails if it
        is not ``call``, and :meth:`check` says why."""


class Arena:
    """Places for the exchanges of a pass, the same on every rank."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pieces: list[Piece] = []
        self._captured: list[Piece] = []
        # Where the next place is looked for: generation of the memory, piece, bytes used of it.
        self.at = (0, 0, 0)

    @property
    def generation(self) -> int:
        """Counts how often places that were handed out before were gone."""
        return self.at[0]

    @property
    def steady(self) -> bool:
        """Whether a pass that came before makes no memory."""
        return len(self._pieces) < 2

    @property
    def used_bytes(self) -> int:
        """Of a rank's memory, up to the place that was taken last in this pass."""
        _, piece, used = self.at
        return sum(map(len, self._pieces[:piece])) + used

    def begin(self) -> bool:
        """Start a pass; what came in several pieces becomes one.

        Returns:
            Whether places handed out before are gone.
        """
        generation, *_ = self.at
        capturing = self._memory.capturing()
        if capturing:
            self._captured += [piece for piece in self._pieces if piece not in self._captured]
        grown = len(self._pieces) > 1 and not capturing
        if grown:
            # The old pieces are let go only after that: peers may have been using them.
            self._pieces = [self._new(sum(map(len, self._pieces)))]
            generation += 1
        self.at = (generation, 0, 0)
        return grown

    def take(self, n_bytes: int) -> list[Tensor]:
        """The next place, uint8[n_bytes] of every rank."""
        generation, n, used = self.at
        n_bytes = max(_aligned(n_bytes), ALIGNED_BYTES)
        while n < len(self._pieces) and used + n_bytes > len(self._pieces[n]):
            n, used = n + 1, 0
        if n == len(self._pieces):
            more = _aligned(int(GROWTH * sum(map(len, self._pieces))))
            self._pieces.append(self._new(max(n_bytes, more)))
        self.at = (generation, n, used + n_bytes)
        return [t[used : used + n_bytes] for t in self._pieces[n].of_ranks]

    def _new(self, n_bytes: int) -> Piece:
        """Memory for passes of all kinds: what is made in inference mode is for inference alone."""
        with torch.inference_mode(False):
            return self._memory.allocate(n_bytes)


def bytes_of(shapes: Shapes, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of tensors one after the other, each aligned."""
    sizes = zip(shapes, dtypes, strict=True)
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in sizes)


def tensors_in(memory: Tensor, shapes: Shapes, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Tensors one after the other in uint8 memory, each aligned."""
    views, at = [], 0
    with torch.inference_mode(False):  # as views of another dtype would be for inference alone
        for shape, dtype in zip(shapes, dtypes, strict=True):
            n_bytes = prod(shape) * dtype.itemsize
            views.append(memory[at : at + n_bytes].view(dtype).view(list(shape)))
            at += _aligned(n_bytes)
    return views


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
