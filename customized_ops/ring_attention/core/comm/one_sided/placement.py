"""Where the parts of an exchange are written: in places of an arena.

Every rank computes the same places and signal channels for an exchange, so no rank asks another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...plan.exchanges.exchange import Exchange
from ..messages import SeenBy
from ..transfer_side import TokenBlock, TransferSide
from .arena import Arena, Memory, Place, bytes_of

DONE = 0  # channel of the signal at the end of a pass; those of exchanges follow


@dataclass(frozen=True, eq=False)
class Placed:
    """An exchange of tensors of certain shapes, at a certain place."""

    channels: list[int]  # of its signal "arrived", and of "free" where that is waited for
    place: Place
    targets: list[int]  # peers that are written to
    sources: list[int]  # peers that write here
    copies: list[tuple[int, TokenBlock]]  # peers, and where the tokens for each are to be written
    received: Any  # of a fetch, the TransferSide that it fills; of results, the parts by peer
    sent_bytes: int
    received_bytes: int
    after: tuple[int, int, int]  # where the next place in the arena is looked for


class Placement:
    """Places and channels for the exchanges of a pass over one rank's group.

    Placed exchanges are cached by the exchange itself and, in a typed key, by what else they depend
    on: the place, the channel, the tensors' shapes and dtypes. The cache is emptied when the arena
    gets new memory.
    """

    def __init__(self, rank: int, size: int, memory: Memory, arena: Arena) -> None:
        self._rank, self._size, self._memory, self._arena = rank, size, memory, arena
        self._placed: WeakKeyDictionary[Exchange, dict[Any, Placed]] = WeakKeyDictionary()
        self._channel = DONE

    def begin(self) -> None:
        """Start a pass."""
        if self._arena.begin():
            self._placed.clear()
        self._channel = DONE

    def has_room(self, tensor: Tensor) -> bool:
        """Whether the next exchange of such tensors can be placed; the same on every rank."""
        return self._memory.holds(tensor) and self._has_channels(1)

    def _has_channels(self, count: int) -> bool:
        return self._channel + count < self._memory.channels

    def others(self, peers: Iterable[int]) -> list[int]:
        """The others, from the next rank on, so that no rank is everybody's first target."""
        others = (p for p in peers if p != self._rank)
        return sorted(others, key=lambda p: (p - self._rank) % self._size)

    def fetch(self, exchange: Exchange, source: TransferSide, seen_by: SeenBy) -> Placed:
        """Places for a fetch, in which each rank's buffers lie one after the other."""
        of_tensors = [(t.shape, t.dtype) for t in source.tensors]
        key = ("fetch", *of_tensors, *source.dims, self._arena.at, self._channel)
        if (placed := self._cached(exchange, key)) is not None:
            return placed
        dtypes = [t.dtype for t in source.tensors]
        of_share = [dim.of_share for dim in source.dims]
        on_ranks = self._on_all_ranks(exchange, seen_by)
        both = list(zip(source.tensors, source.dims, strict=True))
        shapes = [
            [dim.shape(t, there.tokens, n) for t, dim in both] for n, there in enumerate(on_ranks)
        ]
        place = self._arena.take(max(bytes_of(each, dtypes) for each in shapes))
        targets, sources = self.others(exchange.sent), self.others(exchange.received)
        copies, sent = [], 0
        for peer in targets:
            where = on_ranks[peer].received[self._rank]
            there = place.tensors(peer, shapes[peer], dtypes)
            side = TransferSide(there, of_share, {self._rank: where})
            copies.append((peer, side.of(self._rank)))
            sent += _bytes_of_tokens(there, where.count, on_ranks[peer])
        buffers = place.tensors(self._rank, shapes[self._rank], dtypes)
        arriving = sum(exchange.received[p].count for p in sources)
        received = _bytes_of_tokens(buffers, arriving, exchange)
        target = TransferSide(buffers, of_share, exchange.received)
        channels, after = [self._channel + 1], self._arena.at
        placed = Placed(channels, place, targets, sources, copies, target, sent, received, after)
        return self._kept(exchange, key, placed)

    def home(
        self,
        exchange: Exchange,
        results: TransferSide,
        dtypes: Sequence[torch.dtype],
        seen_by: SeenBy,
        spent: Placed | None,
        spared: tuple[int, int],
    ) -> Placed:
        """Places for results that go home, in which each rank has what its peers send it, by peer.
        Results have the dims of all heads, and travel in ``dtypes``.

        Args:
            spent: a fetch whose place is reused instead, if it is large enough and this is worth
                it. That is so on every rank or on none.
            spared: from how many bytes, or fetched tokens, on that is worth it.
        """
        of_tensors = [(t.shape, t.dtype) for t in results.tensors]
        key = ("home", spent, *dtypes, *of_tensors, *results.dims, self._arena.at, self._channel)
        if (placed := self._cached(exchange, key)) is not None:
            return placed
        on_ranks = self._on_all_ranks(exchange, seen_by)
        # For each rank, the shapes of the parts that come to it, by sender.
        coming: list[dict[int, list[list[int]]]] = []
        for rank, there in enumerate(on_ranks):
            shape = TransferSide(results.tensors, results.dims, there.sent).shape
            senders = [p for p in there.sent if p != rank]
            coming.append({p: [shape(n, p) for n in range(len(dtypes))] for p in senders})
        sizes = [{p: bytes_of(shapes, dtypes) for p, shapes in c.items()} for c in coming]
        most = max(sum(size.values()) for size in sizes)
        worth = most >= spared[0] or max(each.tokens for each in on_ranks) >= spared[1]
        if worth and spent is not None and most <= spent.place.n_bytes and self._has_channels(2):
            place, channels = spent.place, [self._channel + 1, self._channel + 2]
        else:
            place, channels = self._arena.take(most), [self._channel + 1]

        def part_of(rank: int, sender: int) -> list[Tensor]:
            before = sum(size for p, size in sizes[rank].items() if p < sender)
            return place.tensors(rank, coming[rank][sender], dtypes, before)

        targets, sources = self.others(exchange.received), self.others(exchange.sent)
        tokens = [dim.tokens for dim in results.dims]
        copies = [(peer, TokenBlock(part_of(peer, self._rank), tokens)) for peer in targets]
        parts = {peer: part_of(self._rank, peer) for peer in coming[self._rank]}
        sent = sum(t.nbytes for _, to in copies for t in to.tensors)
        received = sum(t.nbytes for each in parts.values() for t in each)
        after = self._arena.at
        placed = Placed(channels, place, targets, sources, copies, parts, sent, received, after)
        return self._kept(exchange, key, placed)

    def _on_all_ranks(self, exchange: Exchange, seen_by: SeenBy) -> list[Exchange]:
        return [exchange if n == self._rank else seen_by(n) for n in range(self._size)]

    def _cached(self, exchange: Exchange, key: Any) -> Placed | None:
        placed = self._placed.get(exchange, {}).get(key)
        return None if placed is None else self._go_on_after(placed)

    def _kept(self, exchange: Exchange, key: Any, placed: Placed) -> Placed:
        self._placed.setdefault(exchange, {})[key] = placed
        return self._go_on_after(placed)

    def _go_on_after(self, placed: Placed) -> Placed:
        self._arena.at, self._channel = placed.after, placed.channels[-1]
        return placed


def _bytes_of_tokens(buffers: Sequence[Tensor], count: int, of: Exchange) -> int:
    """Bytes of ``count`` of the tokens that buffers for an exchange hold."""
    return sum(t.nbytes for t in buffers) * count // max(of.tokens, 1)
