"""Memory of every rank of a group that its peers write to, and tensors in it, at the same places on
every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...tape import aside, memory

ALIGNED_BYTES = 256
# An arena that is too small grows by at least this part of its size. Each growth waits for all
# ranks, so there must be few, however lengths change. Their number goes by the logarithm of the
# largest need.
GROWTH = 0.5
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of memory on every rank."""

    of_ranks: list[Tensor]  # uint8[n], in rank order
    holder: object  # keeps the memory alive; the tensors do not
    _as: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.of_ranks[0])

    def as_dtype(self, rank: int, dtype: torch.dtype) -> Tensor:
        """A rank's memory as elements of a dtype."""
        if (rank, dtype) not in self._as:
            with torch.inference_mode(False):  # else it would be an inference tensor
                self._as[rank, dtype] = self.of_ranks[rank].view(dtype)
        return self._as[rank, dtype]


class Place(NamedTuple):
    """A range of a piece, the same on every rank."""

    piece: Piece
    start: int
    n_bytes: int

    def tensors(
        self, rank: int, shapes: Shapes, dtypes: Sequence[torch.dtype], after: int = 0
    ) -> list[Tensor]:
        """Tensors of a rank, one after the other from ``after`` bytes on, each aligned."""
        views, at = [], self.start + after
        for shape, dtype in zip(shapes, dtypes, strict=True):
            size, count = dtype.itemsize, prod(shape)
            whole = self.piece.as_dtype(rank, dtype)
            views.append(whole.narrow(0, at // size, count).view(shape))
            at += _aligned(count * size)
        return views


class Memory(Protocol):
    """Memory of every rank of a group that all of them can write to."""

    channels: int  # the number of channels for signals, the same on every rank

    def allocate(self, n_bytes: int) -> Piece:
        """New memory. All ranks call this together; it returns when no rank has work under way."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is on the device that the memory is on."""

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, which will use the present memory for ever."""

    def name(self, call: int, what: str) -> None:
        """In errors, the pass with the fingerprint ``call`` is called ``what``."""

    def check(self, what: str) -> None:
        """Called before ``what``.

        Raises:
            PeerFailed: a wait has ended in an error that nobody has seen yet.
        """

    def signal(self, peers: Sequence[int], channel: int, call: int) -> None:
        """Set each peer's flag for this rank and channel to the fingerprint ``call``, once the flag
        is clear. This comes after all that this rank's stream was given before."""

    def wait(self, peers: Sequence[int], channel: int, call: int) -> None:
        """Wait until each peer has set its flag here, and clear it. If the flag is not ``call``,
        work that follows fails, and :meth:`check` says why."""


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
        """Counts how often places that were handed out became invalid."""
        return self.at[0]

    @property
    def steady(self) -> bool:
        """Whether a pass like one that came before allocates no memory."""
        return len(self._pieces) < 2

    @property
    def used_bytes(self) -> int:
        """Bytes of a rank's memory, up to the place that was taken last in this pass."""
        _, piece, used = self.at
        return sum(map(len, self._pieces[:piece])) + used

    def owns(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all are in memory of ranks."""
        owned = {memory(t) for piece in self._pieces for t in piece.of_ranks}
        return owned.issuperset(map(memory, tensors))

    def begin(self) -> bool:
        """Start a pass. Memory that came in several pieces becomes one piece.

        Returns:
            Whether places that were handed out before are invalid now.
        """
        generation, *_ = self.at
        capturing = self._memory.capturing()
        if capturing:
            self._captured += [piece for piece in self._pieces if piece not in self._captured]
        grown = len(self._pieces) > 1 and not capturing
        if grown:
            # The old pieces are released only after that: until then peers may be using them.
            self._pieces = [self._new(sum(map(len, self._pieces)))]
            generation += 1
        self.at = (generation, 0, 0)
        return grown

    def take(self, n_bytes: int) -> Place:
        """The next place, of at least ``n_bytes``."""
        generation, n, used = self.at
        n_bytes = max(_aligned(n_bytes), ALIGNED_BYTES)
        while n < len(self._pieces) and used + n_bytes > len(self._pieces[n]):
            n, used = n + 1, 0
        if n == len(self._pieces):
            more = _aligned(int(GROWTH * sum(map(len, self._pieces))))
            self._pieces.append(self._new(max(n_bytes, more)))
        self.at = (generation, n, used + n_bytes)
        return Place(self._pieces[n], used, n_bytes)

    def _new(self, n_bytes: int) -> Piece:
        """Memory for passes of all kinds: what is made in inference mode is for inference alone."""
        with torch.inference_mode(False), aside():
            return self._memory.allocate(n_bytes)


def bytes_of(shapes: Shapes, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of tensors one after the other, each aligned."""
    sizes = zip(shapes, dtypes, strict=True)
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in sizes)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
