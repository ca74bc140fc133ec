"""Ranks that write into one another's memory, whatever provides it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...plan.exchanges.exchange import Exchange
from ...tape import launch, refuse
from ..messages import Arrive, Coming, Comm, SeenBy
from ..packing.parcels import Arrived
from ..pending import Pending
from ..rank_group import Moved, T
from ..signals import NO_CALL
from ..transfer_side import TokenBlock, TransferSide, copy
from .arena import Arena, Memory
from .pass_signals import PassSignals
from .placement import DONE, Placed, Placement

MOST_COPIES = 8  # the most batch entries that are copied one by one, so that each is one range
# Reusing memory is worth a wait for "free" if this many bytes or more go home to a rank, or if a
# rank has fetched this many tokens or more: attending these takes milliseconds.
SPARED_BYTES, SPARED_TOKENS = 64 << 20, 16 << 10


class OneSidedComm(Comm):
    """A Comm whose ranks write into one another's memory.

    Some exchanges go by messages: those without ``seen_by``, those of tensors on another device (a
    group may have a backend for each), and those of a pass for which no channel is left.
    """

    writes_to_peers = True
    ahead = 1_000_000  # all exchanges have their places, so all may start at once
    # From how many bytes, or tokens, on results are written over keys. The same on every rank, and
    # not changed once a pass was made.
    spared_bytes, spared_tokens = SPARED_BYTES, SPARED_TOKENS

    def __init__(self, memory: Memory, *given: Any) -> None:
        super().__init__(*given)
        self._memory, self._arena = memory, Arena(memory)
        self._placement = Placement(self.rank, self.size, memory, self._arena)
        self._peers = self._placement.others(range(self.size))
        self._signals = PassSignals(memory)
        self._passes, self._under_way = 0, False

    def begin(self, call: int) -> None:
        self._enter(call)
        if self._passes:
            launch(self._memory.wait, self._peers, DONE, NO_CALL)
        self._placement.begin()

    def check_device(self) -> None:
        self._memory.check(self.now)

    def check(self) -> None:
        super().check()
        if self._under_way:  # nobody waits for the signals of the pass before
            raise RuntimeError(
                f"seqshard: a pass over the group {self.name!r} ended in an error, so its ranks "
                "may be out of step; make a new process group"
            )

    def _enter(self, call: int) -> None:
        self.check()
        self.meet(call)
        self._memory.name(call, self.now)
        self._signals.call = call
        self._under_way = True

    def end(self) -> None:
        self._passes += 1
        launch(self._memory.signal, self._peers, DONE, NO_CALL)

    def leave(self) -> None:
        self._under_way = False

    def replay_state(self) -> Hashable | None:
        # The first pass waits for no pass before it; one that allocates memory waits for all ranks.
        steady = self._passes and self._arena.steady and not self._memory.capturing()
        return self._arena.generation if steady else None

    def replay(self, moved: Moved, run: Callable[[], T]) -> T:
        self._enter(moved.call)
        results = run()
        self._passes += 1
        self._arena.at = moved.at
        self.counters.sent_bytes += moved.sent_bytes
        self.counters.received_bytes += moved.received_bytes
        self.leave()
        return results

    def owns(self, tensors: Iterable[Tensor]) -> bool:
        return self._arena.owns(tensors)

    def moved(self) -> Moved:
        return super().moved()._replace(at=self._arena.at, call=self._signals.call)

    @property
    def arena_bytes(self) -> int:
        return self._arena.used_bytes

    def _start_fetch(
        self,
        exchange: Exchange,
        source: TransferSide,
        seen_by: SeenBy | None,
        into: Callable[[], TransferSide] | None,
    ) -> Coming:
        if seen_by is None or not self._placement.has_room(source.tensors[0]):
            refuse()
            return super()._start_fetch(exchange, source, seen_by, into)
        placed = self._placement.fetch(exchange, source, seen_by)
        self._write(placed, source)

        def arrive() -> Arrived:
            self._arrived(placed)
            return Arrived([], {})  # peers have written into the buffers themselves

        return Coming(lambda: placed.received, arrive, placed)

    def _start_home(
        self,
        exchange: Exchange,
        source: TransferSide,
        target: TransferSide,
        dtype: torch.dtype | None,
        seen_by: SeenBy | None,
        over: Pending | None,
    ) -> Arrive:
        if seen_by is None or not self._placement.has_room(source.tensors[0]):
            refuse()
            return super()._start_home(exchange, source, target, dtype, seen_by, over)
        dtypes = [dtype or t.dtype for t in source.tensors]
        spent = over.placed if over is not None else None
        spared = self.spared_bytes, self.spared_tokens
        placed = self._placement.home(exchange, target, dtypes, seen_by, spent, spared)
        for free in placed.channels[1:]:
            self._set_flags(placed.sources, free)
            self._await_flags(placed.targets, free)
        self._write(placed, source)

        def arrive() -> Arrived:
            self._arrived(placed)
            return Arrived([], placed.received)

        return arrive

    def _write(self, placed: Placed, source: TransferSide) -> None:
        """Copy to peers what they need, and signal that it has arrived."""
        for peer, to in placed.copies:
            part = source.of(peer)
            if part.rows is None and to.rows is None:
                _copy_ranges(part, to)
            else:
                copy(part, to)
        self._set_flags(placed.targets, placed.channels[0])
        self.counters.sent_bytes += placed.sent_bytes
        self.counters.received_bytes += placed.received_bytes

    def _arrived(self, placed: Placed) -> None:
        self._await_flags(placed.sources, placed.channels[0])

    def _set_flags(self, peers: Sequence[int], channel: int) -> None:
        if peers:
            launch(self._signals.set, peers, channel)

    def _await_flags(self, peers: Sequence[int], channel: int) -> None:
        if peers:
            launch(self._signals.wait, peers, channel)


def _copy_ranges(source: TokenBlock, target: TokenBlock) -> None:
    """Copy all tokens of each tensor, by the copy engine where they are ranges of memory."""
    for part, to, tokens in zip(source.tensors, target.tensors, source.tokens, strict=True):
        # Each entry of a batch may be one range even where the whole tensor is not.
        if 1 < part.shape[0] <= MOST_COPIES and tokens == 1 and part[0].is_contiguous():
            for here, there in zip(part, to, strict=True):
                launch(Tensor.copy_, there, here)
        else:
            launch(Tensor.copy_, to, part)
