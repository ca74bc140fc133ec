"""Signals of a pass."""

from __future__ import annotations

from collections.abc import Sequence

from ..signals import NO_CALL
from .arena import Memory


class PassSignals:
    """Signals of the pass that is under way, whose fingerprint is ``call``. A tape has signals
    without fingerprints, so that passes over other documents may share it."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.call = memory, NO_CALL

    def set(self, peers: Sequence[int], channel: int) -> None:
        """See :meth:`.arena.Memory.signal`."""
        self._memory.signal(peers, channel, self.call)

    def wait(self, peers: Sequence[int], channel: int) -> None:
        """See :meth:`.arena.Memory.wait`."""
        self._memory.wait(peers, channel, self.call)
