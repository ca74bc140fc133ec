"""In-process ranks that write into one another's memory, as GPUs of one host do."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, World
from customized_ops.ring_attention.core.comm.one_sided.arena import Piece
from customized_ops.ring_attention.core.comm.one_sided.one_sided_comm import OneSidedComm
from customized_ops.ring_attention.core.comm.patience import PeerFailed
from customized_ops.ring_attention.core.comm.signals.fingerprint import disagreement
from customized_ops.ring_attention.core.comm.signals.watch import require_alike
from customized_ops.ring_attention.core.tape import launch

POISON = 0xFF  # bytes of a NaN: what was not written shows
CHANNELS = 64

NOBODY = -1  # flags may be set by a rank that has gone on


class ThreadMemory:
    """:class:`~.arena.Memory` of threads; everything takes a random time if ``late`` is set."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._allocated, self.device, self.channels = 0, torch.device("cpu"), CHANNELS
        self.late: random.Random | None = None
        self.problem: str | None = None  # of a wait on a device

    def allocate(self, n_bytes: int) -> Piece:
        """See :class:`~.arena.Memory`."""
        self._allocated += 1
        require_alike(self._world.local.comm.all_gather_object(n_bytes))
        mine = torch.full((n_bytes,), POISON, dtype=torch.uint8)
        of_ranks = self._world.local.comm.all_gather_object(mine)
        # As in processes, torch does not count here what other ranks write.
        return Piece([t.data for t in of_ranks], None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """See :class:`~.arena.Memory`."""
        return tensor.device == self.device

    def capturing(self) -> bool:
        """See :class:`~.arena.Memory`."""
        return False

    def name(self, call: int, what: str) -> None:
        """See :class:`~.arena.Memory`."""

    def check(self, what: str) -> None:
        """See :class:`~.arena.Memory`."""
        if self.problem is not None:
            raise PeerFailed(f"{what}: {self.problem}")

    def _flags(self) -> dict[tuple[int, int, int], int]:
        return self._world.__dict__.setdefault("flags", {})

    def _wait(self) -> None:
        if self.late is not None:
            time.sleep(self.late.random() / 500)

    def signal(self, peers: Sequence[int], channel: int, call: int) -> None:
        """See :class:`~.arena.Memory`."""
        assert channel < self.channels
        for peer in peers:
            self._wait()
            key = (self._rank, peer, channel)
            is_set = lambda key=key: [NOBODY] if self._flags().get(key) else []  # noqa: E731
            self._world.wait_for(is_set, "a flag")
            with self._world.changed:
                self._flags()[key] = call
                self._world.changed.notify_all()

    def wait(self, peers: Sequence[int], channel: int, call: int) -> None:
        """See :class:`~.arena.Memory`."""
        for peer in peers:
            self._wait()
            key = (peer, self._rank, channel)
            clear = lambda key=key: [] if self._flags().get(key) else [NOBODY]  # noqa: E731
            self._world.wait_for(clear, "a flag")
            with self._world.changed:
                theirs, self._flags()[key] = self._flags()[key], 0
                self._world.changed.notify_all()
            if theirs != call:
                raise PeerFailed(f"rank {self._rank}{disagreement(peer, call, theirs)}")


class InProcessOneSided(OneSidedComm, InProcessComm):
    """One thread's side of a world of them."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(ThreadMemory(world, rank), world, rank)

    @property
    def memory(self) -> Any:
        """What the ranks write to."""
        return self._memory

    def end(self) -> None:
        """See :meth:`Comm.end`: what came is gone, as peers may write over it from here on."""
        for piece in self._arena._pieces:
            launch(torch.Tensor.fill_, piece.of_ranks[self.rank], POISON)
        super().end()


class SparingOneSided(InProcessOneSided):
    """One whose results come over keys that were read, however few they are."""

    spared_bytes = 0
