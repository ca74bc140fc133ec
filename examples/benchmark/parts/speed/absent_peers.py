"""One rank of several on one GPU, whose peers are absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from customized_ops.ring_attention.core.comm import comm_groups
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm
from customized_ops.ring_attention.core.comm.one_sided.arena import Piece
from customized_ops.ring_attention.core.comm.one_sided.one_sided_comm import OneSidedComm
from customized_ops.ring_attention.core.comm.signals.flags import (
    CHANNELS,
    FLAG_BYTES,
    Flags,
    flags_bytes,
)


class MemoryOfAbsentPeers:
    """See :class:`~.arena.Memory`: the memory of all ranks is on one GPU. Signals are launched, but
    nobody waits for them."""

    channels = CHANNELS

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        words, kind = flags_bytes(ranks) // FLAG_BYTES, {"dtype": torch.int64, "device": device}
        self._flags = Flags([torch.zeros(words, **kind) for _ in range(ranks)], rank, device)

    def allocate(self, n_bytes: int) -> Piece:
        """See :class:`~.arena.Memory`."""
        torch.cuda.synchronize(self._device)
        kind = {"dtype": torch.uint8, "device": self._device}
        return Piece([torch.zeros(n_bytes, **kind) for _ in range(self._ranks)], None)

    def holds(self, tensor: Tensor) -> bool:
        """See :class:`~.arena.Memory`."""
        return tensor.device == self._device

    def capturing(self) -> bool:
        """See :class:`~.arena.Memory`."""
        return torch.cuda.is_current_stream_capturing()

    def name(self, call: int, what: str) -> None:
        """Nobody fails."""

    def check(self, what: str) -> None:
        """Nobody has failed."""

    def signal(self, peers: Sequence[int], channel: int, call: int) -> None:
        """To nobody."""
        self._flags.put((), channel, call)

    def wait(self, peers: Sequence[int], channel: int, call: int) -> None:
        """For nobody."""
        self._flags.wait((), channel, call)


class AbsentPeers(OneSidedComm, FakeComm):
    """Rank ``rank`` of ``ranks`` as if the others were GPUs of the same host. The host does what it
    does for real ones; copies to peers stay on the GPU."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(MemoryOfAbsentPeers(rank, ranks, device), rank, ranks)
        comm_groups.fake_comm_by_name = lambda name: self  # type: ignore[assignment]
