"""Writing token ranges straight into the memory of the ranks that need them.

    sender                                    receiver
    1. wait until all are done with the
       pass before (begin)
    2. copy each range to its place in the
       receiver's buffer, by the copy engine
    3. signal "arrived"                  -->  4. wait for the signal, read the buffer in place
                                              5. signal "done" to all (end)

Where the tokens are a range, and one block of memory in the dtype that they travel in, nothing is
packed or unpacked, and no GPU thread moves a byte of them; all else, as a share of the heads, lse
or gradients that become wider, is written over there by a kernel. A pass is a forward or a
backward; its exchanges have places in one arena, of one size on every rank, so that every rank
knows where to write. The arena grows to the largest pass, is used again by all
layers and plans of the group, and goes with the group.

Each has a place of its own, but for results that go home at the end of a backward: they may come
into that of the keys that were fetched last. Then ranks first say when they have read those:

    receiver of results                       their sender
    1. signal "free" once it has attended
       the keys it fetched               -->  2. wait for the signal, copy the results, signal
                                                 "arrived"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..plan.exchange import Exchange
from .messages import Comm, Into, Pending, SeenBy, deliver
from .transfer_side import Block, Dims, Put, TransferSide, copy

ALIGNED_BYTES = 256
DONE = 0  # channel; those of exchanges follow
COPIES = 8  # batch entries that are copied one by one, so that each is one range
# Memory is worth waiting for "free" from so many bytes on that go home to a rank, or where a rank
# has fetched so many tokens, as attending these takes milliseconds.
SPARED_BYTES, SPARED_TOKENS = 64 << 20, 16 << 10


@dataclass(frozen=True, eq=False)
class Piece:
    """Some memory of every rank.

    Attributes:
        of_ranks: uint8[n] tensors in rank order.
        holder: what keeps the memory; tensors do not.
    """

    of_ranks: list[Tensor]
    holder: object

    def __len__(self) -> int:
        return len(self.of_ranks[0])


class Memory(Protocol):
    """Memory of every rank of a group that all of them can write to.

    Attributes:
        channels: how many there are for signals, the same on every rank.
    """

    channels: int

    def allocate(self, n_bytes: int) -> Piece:
        """New memory. All ranks call this together; it returns when no rank has work under way."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is on the device that the memory is on."""
        ...

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, which will use the memory of now for ever."""
        ...

    def put_signal(self, peer: int, channel: int) -> None:
        """Set the peer's flag for this rank and channel, once it is clear; after all that this
        rank's stream was given before."""
        ...

    def wait_signal(self, peer: int, channel: int) -> None:
        """Wait until the peer has set the flag here, and clear it."""
        ...


class Arena:
    """Places for the exchanges of a pass, the same on every rank.

    Attributes:
        at: where the next place is looked for: generation of the memory, piece, bytes used of it.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pieces: list[Piece] = []
        self._captured: list[Piece] = []
        self.at = (0, 0, 0)

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
            self._pieces = [self._memory.allocate(sum(map(len, self._pieces)))]
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
            self._pieces.append(self._memory.allocate(n_bytes))
        self.at = (generation, n, used + n_bytes)
        return [t[used : used + n_bytes] for t in self._pieces[n].of_ranks]


Copy = tuple[int, Block]  # a peer, and where the tokens for it are to be written


@dataclass(frozen=True, eq=False)
class Prepared:
    """An exchange of tensors of certain shapes, at a certain place.

    Attributes:
        channels: of its signal "arrived", and of "free" where that is waited for.
        places: uint8 of every rank, where it writes.
        copies: what to write to peers. buffers: what is received.
        targets, sources: peers that are written to, and that write here.
        after: where the arena goes on.
    """

    channels: tuple[int, ...]
    places: list[Tensor]
    copies: tuple[Copy, ...]
    buffers: Any
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    after: tuple[int, int, int]


class Fetched(Pending):
    """What a fetch has on its way, and where."""

    def __init__(self, ready: Prepared, finish: Callable[[], Any]) -> None:
        super().__init__(finish)
        self.ready = ready


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
        self._prepared: WeakKeyDictionary[Exchange, dict[Any, Prepared]] = WeakKeyDictionary()
        self._peers = self._others(range(self.size))
        self._channel = DONE
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
        if self._arena.begin():
            self._prepared.clear()
        self._channel = DONE

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

    def _has_place(self, tensor: Tensor) -> bool:
        """Whether the next exchange of such tensors can be pushed; alike on every rank."""
        return self._memory.holds(tensor) and self._channel + 1 < self._memory.channels

    def _others(self, peers: Iterable[int]) -> list[int]:
        """From the next rank on, so that no rank is everybody's first target."""
        others = (p for p in peers if p != self.rank)
        return sorted(others, key=lambda p: (p - self.rank) % self.size)

    def fetch(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        seen_by: SeenBy | None = None,
    ) -> Pending:
        """See :meth:`Comm.fetch`."""
        if seen_by is None or not self._has_place(tensors[0]):
            return super().fetch(exchange, tensors, dims)
        ready = self._ready(
            "fetch",
            exchange,
            tensors,
            dims,
            (),
            lambda: self._fetching(exchange, tensors, dims, seen_by),
        )
        source = TransferSide(tensors, dims, exchange.sent)
        self._write(ready, source)
        if self.rank in exchange.sent:  # what the rank holds itself is part of the buffer
            target = TransferSide(ready.buffers, [dim.of_share for dim in dims], exchange.received)
            copy(source.of(self.rank), target.of(self.rank))

        def finish() -> list[Tensor]:
            self._arrived(ready)
            return list(ready.buffers)

        return Fetched(ready, finish)

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
        if seen_by is None or not self._has_place(results[0]):
            return super().send_home(exchange, results, into, dims, put, dtype)
        spent = over.ready if isinstance(over, Fetched) else None
        source = TransferSide(results, [dim.of_share for dim in dims], exchange.received)
        ready = self._ready(
            "send home",
            exchange,
            results,
            dims,
            (dtype, spent),
            lambda: self._homing(exchange, results, dims, dtype, seen_by, spent),
        )
        for free in ready.channels[1:]:
            for peer in ready.sources:
                self._memory.put_signal(peer, free)
            for peer in ready.targets:
                self._memory.wait_signal(peer, free)
        self._write(ready, source)
        parts = ready.buffers
        if self.rank in exchange.sent:  # what the rank made for itself is left as it is
            parts = parts | {self.rank: source.take(self.rank)}

        def finish() -> None:
            self._arrived(ready)
            deliver(parts, into, dims, exchange, put)

        return Pending(finish)

    def _ready(
        self,
        kind: str,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        how: tuple[Any, ...],
        prepare: Callable[[], Prepared],
    ) -> Prepared:
        """The exchange as prepared when it was first met with such tensors at this place."""
        of_tensors = [(t.shape, t.dtype) for t in tensors]
        key = (kind, self._arena.at, self._channel, *how, *of_tensors, *dims)
        known = self._prepared.get(exchange)
        if known is None:
            known = self._prepared[exchange] = {}
        ready = known.get(key)
        if ready is None:
            ready = known[key] = prepare()
        self._arena.at, self._channel = ready.after, ready.channels[-1]
        return ready

    def _write(self, ready: Prepared, source: TransferSide) -> None:
        """Copy what peers need to them, and tell them."""
        for peer, to in ready.copies:
            part = source.of(peer)
            if part.rows is None and to.rows is None:
                _copy_ranges(part, to)
            else:
                copy(part, to)
        for peer in ready.targets:
            self._memory.put_signal(peer, ready.channels[0])
        self.counters.sent_bytes += ready.sent_bytes
        self.counters.received_bytes += ready.received_bytes

    def _arrived(self, ready: Prepared) -> None:
        for peer in ready.sources:
            self._memory.wait_signal(peer, ready.channels[0])

    def _fetching(
        self, exchange: Exchange, tensors: Sequence[Tensor], dims: Sequence[Dims], seen_by: SeenBy
    ) -> Prepared:
        """Each rank's place holds its buffers one after the other."""

        dtypes = [t.dtype for t in tensors]
        sides = [exchange if n == self.rank else seen_by(n) for n in range(self.size)]
        shapes = [
            [dim.shape(t, side.tokens, n) for t, dim in zip(tensors, dims, strict=True)]
            for n, side in enumerate(sides)
        ]
        places = self._arena.take(max(_bytes(each, dtypes) for each in shapes))
        copies, sent = [], 0
        for peer in self._others(exchange.sent):
            where = sides[peer].received[self.rank]
            there = _views(places[peer], shapes[peer], dtypes)
            received_there = TransferSide(there, [dim.of_share for dim in dims], {self.rank: where})
            copies.append((peer, received_there.of(self.rank)))
            sent += sum(where.count * to.nbytes // max(sides[peer].tokens, 1) for to in there)
        buffers = _views(places[self.rank], shapes[self.rank], dtypes)
        arriving = sum(exchange.received[p].count for p in self._others(exchange.received))
        received = sum(t.nbytes for t in buffers) * arriving // max(exchange.tokens, 1)
        ways = exchange.sent, exchange.received
        return self._done(places, copies, buffers, *ways, sent, received)

    def _homing(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        dims: Sequence[Dims],
        dtype: torch.dtype | None,
        seen_by: SeenBy,
        spent: Prepared | None,
    ) -> Prepared:
        """Each rank's place holds what its peers send it, by peer; that of ``spent``, if it is
        large enough and that is worth it, which is so on every rank or on none."""
        dtypes = [dtype or t.dtype for t in results]
        seen = [exchange if n == self.rank else seen_by(n) for n in range(self.size)]

        def incoming(rank: int) -> dict[int, list[list[int]]]:
            """Shapes of the parts that come to a rank, by sender."""
            sent = seen[rank].sent
            shape = TransferSide(results, dims, sent).shape
            return {p: [shape(n, p) for n in range(len(dtypes))] for p in sent if p != rank}

        coming = [incoming(rank) for rank in range(self.size)]
        sizes = [{p: _bytes(shapes, dtypes) for p, shapes in c.items()} for c in coming]
        most = max(sum(size.values()) for size in sizes)
        tokens = max(each.tokens for each in seen)
        worth = most >= self.spared_bytes or tokens >= self.spared_tokens
        again = worth and spent is not None and most <= len(spent.places[0])
        again = again and self._channel + 2 < self._memory.channels
        places = spent.places if spent is not None and again else self._arena.take(most)

        def part_of(rank: int, sender: int) -> list[Tensor]:
            before = sum(size for p, size in sizes[rank].items() if p < sender)
            return _views(places[rank][before:], coming[rank][sender], dtypes)

        copies = [
            (peer, Block(part_of(peer, self.rank), [dim.tokens for dim in dims]))
            for peer in self._others(exchange.received)
        ]
        buffers = {peer: part_of(self.rank, peer) for peer in coming[self.rank]}
        sent = sum(t.nbytes for _, to in copies for t in to.tensors)
        received = sum(t.nbytes for parts in buffers.values() for t in parts)
        ways = exchange.received, exchange.sent
        return self._done(places, copies, buffers, *ways, sent, received, free=again)

    def _done(
        self,
        places: list[Tensor],
        copies: list[Copy],
        buffers: Any,
        targets: Iterable[int],
        sources: Iterable[int],
        sent_bytes: int,
        received_bytes: int,
        *,
        free: bool = False,
    ) -> Prepared:
        channel = self._channel + 1
        return Prepared(
            (channel, channel + 1) if free else (channel,),
            places,
            tuple(copies),
            buffers,
            tuple(self._others(targets)),
            tuple(self._others(sources)),
            sent_bytes,
            received_bytes,
            self._arena.at,
        )


def _copy_ranges(source: Block, target: Block) -> None:
    """Copy all tokens of each tensor, by the copy engine where they are ranges of memory."""
    for part, to, tokens in zip(source.tensors, target.tensors, source.tokens, strict=True):
        # Entries of a batch may be ranges that the whole is not.
        if 1 < part.shape[0] <= COPIES and tokens == 1 and part[0].is_contiguous():
            for here, there in zip(part, to, strict=True):
                there.copy_(here)
        else:
            to.copy_(part)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
    """Of tensors one after the other."""
    sizes = zip(shapes, dtypes, strict=True)
    return sum(_aligned(prod(shape) * dtype.itemsize) for shape, dtype in sizes)


def _views(
    memory: Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Tensors one after the other in uint8 memory."""
    views, at = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        n_bytes = prod(shape) * dtype.itemsize
        views.append(memory[at : at + n_bytes].view(dtype).view(list(shape)))
        at += _aligned(n_bytes)
    return views
