"""What one rank sends and receives in one step, as values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Ints
from ...index_table import IndexTable
from ...mask.intervals import spread
from .peer_tokens import PeerTokens, by_peer

NO_RANGES: Ints = np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Exchange:
    """Token ranges that one rank sends and receives in one step.

    Attributes:
        send: int64[n, 3]: peer, first local token, count; by peer, then by receive position.
        recv: int64[m, 3]: peer, first token in the receive buffer, count; by buffer position. For
            each peer both sides list the same ranges in one order.
        places: int64[t, 3]: which tokens the buffer holds (global start, stop, offset), by start,
            or where they are received sender by sender, its own last, by offset.
        tokens: length of the receive buffer. A rank may be its own peer (a local copy).
        team_size: ranks that share out the heads; of each token, a peer is sent its share, and this
            rank receives its own.
        relay: how the tokens of the buffer that are not in ``recv`` arrive. Where a plan relays
            keys, each exchange of keys has one, if only an empty one.
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
    def sent(self) -> PeerTokens:
        """Where each peer's tokens are among the rank's own."""
        return by_peer(self.send, self.team_size)

    @cached_property
    def received(self) -> PeerTokens:
        """Where each peer's tokens go in the receive buffer."""
        return by_peer(self.recv, self.team_size)

    @cached_property
    def indices(self) -> Ints:
        """int64[tokens]: the global token at each buffer position."""
        indices = np.zeros(self.tokens, dtype=np.int64)
        x, token = spread(self.places[:, 0], self.places[:, 1])
        indices[self.places[x, 2] + token - self.places[x, 0]] = token
        return indices

    def tables(self, rank: int, *, writes: bool) -> list[IndexTable]:
        """Where scattered tokens are sent from and received, for devices of this rank. ``writes``:
        ranks write to where peers read; else they send messages."""
        found: list[IndexTable] = []
        for sides in ((part.sent, part.received) for part in self.parts):
            each = [where for side in sides for p, where in side.items() if writes or p == rank]
            if not writes:
                each += [of.where for side in sides for of in side.lists((rank,), shared=True)]
                home = sides[0].lists((rank,), shared=False)
                found += [table for of in home if of.summed for table in of.sums.tables]
            found += [where.table for where in each if where.ranges is not None]
        return found


class Relay(NamedTuple):
    """Tokens that come to a rank of a host and go on from there (see :mod:`.relays`).

    Attributes:
        cross: from their holders into buffers of ranks that relay them. Last in the buffer come
            the rank's own tokens that others of its host need, as a copy.
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
