"""What one rank sends and receives in one step, as values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Ints
from ...index_table import IndexTable
from ...mask.intervals import members, runs, spread

NO_RANGES: Ints = np.zeros((0, 3), dtype=np.int64)

# Up to this many ranges, a loop is several times as fast as arrays (for 7: 12 us against 41). A
# batch of packed documents on 8 ranks has 16 lists of 1 to 13.
FEW = 32


@dataclass(frozen=True, eq=False)
class Where:
    """Which ``count`` tokens of a tensor: those from ``start`` on, or those of ``ranges``, starts
    and stops, int64[n] each."""

    start: int
    count: int
    ranges: tuple[Ints, Ints] | None = None

    @cached_property
    def indices(self) -> Ints | None:
        """int64[count]: the indices of scattered tokens."""
        return None if self.ranges is None else members(*self.ranges)

    @cached_property
    def table(self) -> IndexTable:
        """``indices``, for devices."""
        assert self.indices is not None
        return IndexTable(self.indices)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Token ranges that one rank sends and receives in one step.

    Attributes:
        send: int64[n, 3]: peer, first local token, count; by peer, then by receive position.
        recv: int64[m, 3]: peer, first token in the receive buffer, count; by buffer position. For
            each peer both sides list the same ranges in one order.
        places: int64[t, 3]: which tokens the buffer holds (global start, stop, offset), by start.
        tokens: length of the receive buffer. A rank may be its own peer (a local copy).
        team_size: ranks that share out the heads; of each token, a peer is sent its share, and this
            rank receives its own.
        relay: how the tokens of the buffer that are not in ``recv`` arrive, if there are any.
    """

    send: Ints
    recv: Ints
    places: Ints
    tokens: int
    team_size: int = 1
    relay: Relay | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state in a pickled plan: without indices of tokens, which are soon made again."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send and nothing to receive."""
        return len(self.send) == 0 and len(self.recv) == 0

    @property
    def parts(self) -> tuple[Exchange, ...]:
        """This exchange, and those of its relay."""
        return (self, *(self.relay or ()))

    @cached_property
    def sent(self) -> dict[int, Where]:
        """Where each peer's tokens are among the rank's own."""
        return _by_peer(self.send)

    @cached_property
    def received(self) -> dict[int, Where]:
        """Where each peer's tokens go in the receive buffer."""
        return _by_peer(self.recv)

    @cached_property
    def indices(self) -> Ints:
        """int64[tokens]: the global token at each buffer position."""
        indices = np.zeros(self.tokens, dtype=np.int64)
        x, token = spread(self.places[:, 0], self.places[:, 1])
        indices[self.places[x, 2] + token - self.places[x, 0]] = token
        return indices

    @property
    def tables(self) -> list[IndexTable]:
        """Where scattered tokens are sent from and received, for devices."""
        sides = [w for e in self.parts for w in (*e.sent.values(), *e.received.values())]
        return [where.table for where in sides if where.indices is not None]


class Relay(NamedTuple):
    """Tokens that come to a rank of a host and go on from there (see :mod:`.relays`).

    Attributes:
        cross: from their holders into buffers of ranks that relay them.
        spread: from these buffers to the places in the exchange's own buffer; includes what a rank
            relays for itself, as a copy.
    """

    cross: Exchange
    spread: Exchange


class Exchanges(NamedTuple):
    """What one rank sends and receives: rows, and the keys of each stage, None where it reads its
    own in place."""

    q: Exchange
    kv: tuple[Exchange | None, ...]

    def prepare(self, sender: int | None = None) -> None:
        """Work out, ahead of a step, what it looks up: everything, or only where tokens of one
        ``sender`` are received."""
        for each in (self.q, *self.kv):
            parts = each.parts if each is not None else ()
            for part in (part for part in parts if not part.empty):
                sent, received = part.sent, part.received
                if sender is None:
                    sides = [*sent.values(), *received.values()]
                else:  # of other peers it counts how many tokens there are
                    sides = [received[sender]] if sender in received else []
                for where in sides:
                    _ = where.indices


def _by_peer(ranges: Ints) -> dict[int, Where]:
    """Rows (peer, start, count) by peer, each peer's in their order. Peers with the same tokens
    share one :class:`Where`, so that these are put together once for all of them."""
    return _of_few(ranges) if len(ranges) <= FEW else _of_many(ranges)


def _of_few(ranges: Ints) -> dict[int, Where]:
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for peer, start, count in ranges.tolist():
        first, last = starts.setdefault(peer, []), stops.setdefault(peer, [])
        if last and last[-1] == start:
            last[-1] += count
        else:
            first.append(start)
            last.append(start + count)
    alike: dict[tuple[int, ...], Where] = {}
    found = {}
    for peer in sorted(starts):
        first, last = starts[peer], stops[peer]
        if (key := (*first, *last)) not in alike:
            several = (np.array(first), np.array(last)) if len(first) > 1 else None
            alike[key] = Where(0 if several else first[0], sum(last) - sum(first), several)
        found[peer] = alike[key]
    return found


def _of_many(ranges: Ints) -> dict[int, Where]:
    peer, start, count = ranges[ranges[:, 0].argsort(kind="stable")].T
    stop = start + count
    heads, lasts = runs((peer[1:] != peer[:-1]) | (start[1:] != stop[:-1]), len(peer))
    peer, start, stop = peer[heads], start[heads], stop[lasts]
    heads, lasts = runs(peer[1:] != peer[:-1], len(peer))
    length = np.append(0, (stop - start).cumsum())
    counts = length[lasts + 1] - length[heads]
    of_each = (each.tolist() for each in (peer[heads], start[heads], counts, heads, lasts + 1))
    both = np.stack([start, stop])
    alike: dict[bytes, Where] = {}
    found = {}
    for p, first, n, a, b in zip(*of_each, strict=True):
        key = both[:, a:b].tobytes()
        if key not in alike:
            alike[key] = Where(first, n) if b - a == 1 else Where(0, n, (start[a:b], stop[a:b]))
        found[p] = alike[key]
    return found
