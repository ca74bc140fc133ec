"""Writing token ranges straight into the memory of the ranks that need them.

    sender                                    receiver
    1. wait until all are done with the
       pass before (begin)
    2. copy each range to its place in the
       receiver's buffer, by the copy engine
    3. signal "arrived"                  -->  4. wait for the signal, read the buffer in place
                                              5. signal "done" to all (end)

Where the tokens are a range, and one block of memory in the dtype that they travel in, nothing is
packed or unpacked, and no GPU thread moves a byte of them. A kernel writes everything else to the
receiver: a share of the heads, lse, gradients that become wider. A pass is a forward or a backward;
its exchanges have places in one arena, of one size on every rank, so that every rank knows where to
write (``placement``). The arena grows to the largest pass, is used again by all layers and plans of
the group, and is freed with the group.

Each exchange has a place of its own, but for results that go home at the end of a backward: they
may come into the place of the keys that were fetched last. Then ranks first say when they have read
those:

    receiver of results                       their sender
    1. signal "free" once it has attended
       the keys it fetched               -->  2. wait for the signal, copy the results, signal
                                                 "arrived"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan.exchange import Exchange
from .arena import Arena, Memory
from .messages import Comm, Into, Pending, SeenBy, deliver
from .placement import DONE, Placed, Placement
from .transfer_side import Block, Dims, Put, TransferSide, copy

COPIES = 8  # batch entries that are copied one by one, so that each is one range
# Memory is worth waiting for "free" from so many bytes on that go home to a rank, or where a rank
# has fetched so many tokens, as attending these takes milliseconds.
SPARED_BYTES, SPARED_TOKENS = 64 << 20, 16 << 10


class Fetched(Pending):
    """A fetch that is on its way, and its place."""

    def __init__(self, placed: Placed, finish: Callable[[], Any]) -> None:
        super().__init__(finish)
        self.placed = placed


class OneSidedComm(Comm):
    """A Comm whose ranks write into one another's memory.

    What comes without ``seen_by`` goes by messages, and so do tensors of another device (a group
    may have a backend for each), and exchanges of a pass that there is no channel left for.

    Attributes:
        spared_bytes, spared_tokens: of results, from which on they come over keys; the same on
            every rank, and not changed once a pass was made.
    """

    ahead = 1_000_000  # all exchanges have their places, so all may start at once
    spared_bytes, spared_tokens = SPARED_BYTES, SPARED_TOKENS

    def __init__(self, memory: Memory, *given: Any) -> None:
        super().__init__(*given)
        self._memory, self._arena = memory, Arena(memory)
        self._placement = Placement(self.rank, self.size, memory, self._arena)
        self._peers = self._placement.others(range(self.size))
        self._passes = 0
        self._under_way = False

    def begin(self) -> None:
        """See :meth:`Comm.begin`.

        Raises:
            RuntimeError: the pass before ended in an error, and nobody waits for its signals.
        """
        if self._under_way:
            raise RuntimeError(
                f"seqshard: a pass over the group {self.name!r} ended in an error, so its ranks "
                "may be out of step; make a new process group"
            )
        self._under_way = True
        if self._passes:
            for peer in self._peers:
                self._memory.wait_signal(peer, DONE)
        self._placement.begin()

    def end(self) -> None:
        """See :meth:`Comm.end`."""
        self._passes += 1
        for peer in self._peers:
            self._memory.put_signal(peer, DONE)

    def leave(self) -> None:
        """See :meth:`Comm.leave`."""
        self._under_way = False

    @property
    def arena_bytes(self) -> int:
        """See :class:`Comm`."""
        return self._arena.used_bytes

    def fetch(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        seen_by: SeenBy | None = None,
    ) -> Pending:
        """See :meth:`Comm.fetch`."""
        if seen_by is None or not self._placement.has_room(tensors[0]):
            return super().fetch(exchange, tensors, dims)
        placed = self._placement.fetch(exchange, tensors, dims, seen_by)
        source = TransferSide(tensors, dims, exchange.sent)
        self._write(placed, source)
        if self.rank in exchange.sent:  # what the rank holds itself is part of the buffer
            target = TransferSide(placed.buffers, [d.of_share for d in dims], exchange.received)
            copy(source.of(self.rank), target.of(self.rank))

        def finish() -> list[Tensor]:
            self._arrived(placed)
            return list(placed.buffers)

        return Fetched(placed, finish)

    def send_home(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Into,
        dims: Sequence[Dims],
        put: Put,
        dtype: torch.dtype | None = None,
        seen_by: SeenBy | None = None,
        over: Pending | None = None,
    ) -> Pending:
        """See :meth:`Comm.send_home`."""
        if seen_by is None or not self._placement.has_room(results[0]):
            return super().send_home(exchange, results, into, dims, put, dtype)
        placed = self._placement.home(
            exchange,
            TransferSide(results, dims, exchange.sent),
            [dtype or t.dtype for t in results],
            seen_by,
            over.placed if isinstance(over, Fetched) else None,
            (self.spared_bytes, self.spared_tokens),
        )
        for free in placed.channels[1:]:
            for peer in placed.sources:
                self._memory.put_signal(peer, free)
            for peer in placed.targets:
                self._memory.wait_signal(peer, free)
        source = TransferSide(results, [dim.of_share for dim in dims], exchange.received)
        self._write(placed, source)
        parts = placed.buffers
        if self.rank in exchange.sent:  # what the rank made for itself is left as it is
            parts = parts | {self.rank: source.take(self.rank)}

        def finish() -> None:
            self._arrived(placed)
            deliver(parts, into, dims, exchange, put)

        return Pending(finish)

    def _write(self, placed: Placed, source: TransferSide) -> None:
        """Copy to peers what they need, and signal that it has arrived."""
        for peer, to in placed.copies:
            part = source.of(peer)
            if part.rows is None and to.rows is None:
                _copy_ranges(part, to)
            else:
                copy(part, to)
        for peer in placed.targets:
            self._memory.put_signal(peer, placed.channels[0])
        self.counters.sent_bytes += placed.sent_bytes
        self.counters.received_bytes += placed.received_bytes

    def _arrived(self, placed: Placed) -> None:
        for peer in placed.sources:
            self._memory.wait_signal(peer, placed.channels[0])


def _copy_ranges(source: Block, target: Block) -> None:
    """Copy all tokens of each tensor, by the copy engine where they are ranges of memory."""
    for part, to, tokens in zip(source.tensors, target.tensors, source.tokens, strict=True):
        # Entries of a batch may be ranges that the whole is not.
        if 1 < part.shape[0] <= COPIES and tokens == 1 and part[0].is_contiguous():
            for here, there in zip(part, to, strict=True):
                there.copy_(here)
        else:
            to.copy_(part)
