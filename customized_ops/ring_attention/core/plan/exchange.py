"""What one rank sends and receives in one step: of moves, or from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Ints, columns
from ..index_table import IndexTable
from ..layout import Layout
from ..mask.intervals import joined, members, spread, touched

# Columns of moves: the team that receives, the rank that sends, global tokens, offset of the first
# at the sender. Every rank of a team receives its share of the heads of these tokens.
RECV, SEND, TOKEN0, TOKEN1, SEND_OFFSET = range(5)
Moves = Ints  # int64[n, 5]
NO_MOVES: Moves = np.zeros((0, 5), dtype=np.int64)
FEW = 256  # ranges, that are gone through one by one: numpy has not begun by then
NO_RANGES: Ints = np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Where:
    """Which ``count`` tokens of a tensor: those from ``start`` on, or those of ``ranges``, starts
    and stops, int64[n] each."""

    start: int
    count: int
    ranges: tuple[Ints, Ints] | None = None

    @cached_property
    def indices(self) -> Ints | None:
        """int64[count], of scattered tokens."""
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
        team_size: ranks that share out the heads: of each token a peer is sent, and this rank
            receives, its share.
        relay: how the tokens of the buffer that are not in ``recv`` come, if there are some.
    """

    send: Ints
    recv: Ints
    places: Ints
    tokens: int
    team_size: int = 1
    relay: Relay | None = None

    def __getstate__(self) -> dict[str, Any]:
        """In a pickled plan: without an index for each token, soon made again."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}

    @property
    def empty(self) -> bool:
        """Nothing to send and nothing to receive."""
        return len(self.send) == 0 and len(self.recv) == 0

    @property
    def parts(self) -> tuple[Exchange, ...]:
        """It, and those of its relay."""
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
        return token_indices(self.places, self.tokens)

    @property
    def tables(self) -> list[IndexTable]:
        """Where scattered tokens are sent from and received, for devices."""
        sides = [w for e in self.parts for w in (*e.sent.values(), *e.received.values())]
        return [where.table for where in sides if where.indices is not None]


class Relay(NamedTuple):
    """Tokens that come to a rank of a host and go on from there (see :mod:`.relays`).

    Attributes:
        cross: from their holders into buffers of ranks that relay them.
        spread: from these buffers to the places of the exchange's own; also what a rank relays for
            itself, a copy.
    """

    cross: Exchange
    spread: Exchange


class Exchanges(NamedTuple):
    """What one rank sends and receives: rows, and the keys of each stage, None where it reads its
    own in place."""

    q: Exchange
    kv: tuple[Exchange | None, ...]

    def prepare(self, sender: int | None = None) -> None:
        """Work out now what a step looks up, not in the step: all, or where tokens of one
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
    """Rows (peer, start, count) by peer, each peer's in their order."""
    return _of_few(ranges) if len(ranges) <= FEW else _of_many(ranges)


def _of_many(ranges: Ints) -> dict[int, Where]:
    ranges = ranges[ranges[:, 0].argsort(kind="stable")]
    peers, firsts = np.unique(ranges[:, 0], return_index=True)
    where = {}
    for peer, (_, start, count) in zip(
        peers.tolist(), (part.T for part in np.split(ranges, firsts[1:])), strict=True
    ):
        stop = start + count
        if (start[1:] == stop[:-1]).all():
            where[peer] = Where(int(start[0]), int(count.sum()))
        else:
            where[peer] = Where(0, int(count.sum()), (start, stop))
    return where


def _of_few(ranges: Ints) -> dict[int, Where]:
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for peer, start, count in ranges.tolist():
        if peer not in starts:
            starts[peer], stops[peer] = [start], [start + count]
        elif stops[peer][-1] == start:
            stops[peer][-1] += count
        else:
            starts[peer].append(start)
            stops[peer].append(start + count)
    return {peer: _where(starts[peer], stops[peer]) for peer in sorted(starts)}


def _where(starts: list[int], stops: list[int]) -> Where:
    if len(starts) == 1:
        return Where(starts[0], stops[0] - starts[0])
    return Where(0, sum(stops) - sum(starts), (np.array(starts), np.array(stops)))


def exchange(moves: Moves, rank: int, team_size: int, *, local: bool) -> Exchange:
    """``rank``'s side of ``moves``, received in global order.

    Args:
        local: whether what the rank holds itself is received too, as a copy.
    """
    (one,) = exchanges(moves, np.zeros(len(moves), dtype=np.int64), 1, rank, team_size, local=local)
    return one


def exchanges(
    moves: Moves, step: Ints, steps: int, rank: int, team_size: int, *, local: bool
) -> list[Exchange]:
    """:func:`exchange` for each of ``steps`` steps; ``step``, int64[n], is that of each move."""
    mine = moves[:, RECV] == rank // team_size
    if not local:
        mine &= moves[:, SEND] != rank
    sends = moves[:, SEND] == rank
    out, at, peers = _to_each(moves[sends], step[sends], team_size, local=local)
    return _by_step((moves[mine], step[mine]), (out, at), peers, steps, team_size)


def exchanges_of_all(
    rows: Moves, keys: Moves, step: Ints, steps: int, ranks: int, team_size: int, *, local: bool
) -> list[list[Exchange]]:
    """Of every rank :func:`exchange` of rows, and :func:`exchanges` of keys, worked out together:
    the moves are those of all ranks, and ``local`` is of keys."""
    at_once = np.zeros(len(rows), dtype=np.int64)
    of_rows = _to_each(rows, at_once, team_size, local=False)
    of_keys = _to_each(keys, 1 + step, team_size, local=local)
    every, at, to = map(np.concatenate, zip(of_rows, of_keys, strict=True))
    count = 1 + steps
    into, out = (every, to * count + at), (every, every[:, SEND] * count + at)
    found = _by_step(into, out, to, ranks * count, team_size)
    return [found[rank * count : (rank + 1) * count] for rank in range(ranks)]


def _to_each(moves: Moves, step: Ints, team_size: int, *, local: bool) -> tuple[Moves, Ints, Ints]:
    """The moves, with their steps, to each rank of the teams that receive them; and these ranks."""
    if team_size == 1:
        to = moves[:, RECV]
    else:
        to = (moves[:, [RECV]] * team_size + np.arange(team_size)).reshape(-1)
        moves, step = np.repeat(moves, team_size, axis=0), np.repeat(step, team_size)
    if local:
        return moves, step, to
    away = to != moves[:, SEND]
    return moves[away], step[away], to[away]


def _by_step(
    into: tuple[Moves, Ints], out: tuple[Moves, Ints], peers: Ints, steps: int, team_size: int
) -> list[Exchange]:
    """What is received and what is sent, each with its step; ``peers`` are those that it is sent
    to."""
    if len(into[0]) + len(out[0]) == 0:
        return [Exchange(NO_RANGES, NO_RANGES, NO_RANGES, 0, team_size)] * steps
    numbers = np.arange(steps + 1)
    order = np.lexsort((into[0][:, TOKEN0], into[1]))
    got, at = into[0][order], into[1][order]
    size = got[:, TOKEN1] - got[:, TOKEN0]
    ends = np.append(0, size.cumsum())
    of_recv = at.searchsorted(numbers)
    begin = ends[of_recv]  # of each step, in all that is received
    offset = ends[:-1] - begin[at]
    recv = columns(got[:, SEND], offset, size)
    places = joined(columns(got[:, TOKEN0], got[:, TOKEN1], offset))
    # Each step's places start at 0, so none is joined to one of the step before.
    some = numbers[:-1][begin[1:] > begin[:-1]]
    of_places = some[(places[:, 2] == 0).cumsum() - 1].searchsorted(numbers)
    order = np.lexsort((out[0][:, TOKEN0], peers, out[1]))
    given, at = out[0][order], out[1][order]
    send = columns(peers[order], given[:, SEND_OFFSET], given[:, TOKEN1] - given[:, TOKEN0])
    cuts = (each.tolist() for each in (at.searchsorted(numbers), of_recv, of_places, begin))
    return [
        Exchange(send[s0:s1], recv[r0:r1], places[p0:p1], b1 - b0, team_size)
        for (s0, s1), (r0, r1), (p0, p1), (b0, b1) in zip(*map(pairwise, cuts), strict=True)
    ]


def token_indices(places: Ints | Sequence[Sequence[int]], tokens: int) -> Ints:
    """int64[tokens]: the global token at each position of a buffer with these places."""
    table = np.asarray(places, dtype=np.int64).reshape(-1, 3)
    indices = np.zeros(tokens, dtype=np.int64)
    x, token = spread(table[:, 0], table[:, 1])
    indices[table[x, 2] + token - table[x, 0]] = token
    return indices


@lru_cache(maxsize=64)
def relayout(source: Layout, target: Layout, shift: int, rank: int) -> Exchange:
    """``rank``'s side of moving tokens from ``source`` to ``target``.

    Args:
        shift: where ``target`` has token i, token i - shift arrives, modulo the length.
    """
    return wanted_exchange(_rolled(target.pieces, shift, target.total), source, rank)


@lru_cache(maxsize=64)
def gather(source: Layout, rank: int) -> Exchange:
    """``rank``'s side of every rank getting all tokens, in order."""
    ranks = np.arange(source.group_size)
    zero = np.zeros_like(ranks)
    wanted = columns(ranks, zero, np.full_like(ranks, source.total), zero)
    return wanted_exchange(wanted[wanted[:, 1] < wanted[:, 2]], source, rank)


def wanted_exchange(wanted: Ints, source: Layout, rank: int) -> Exchange:
    """``rank``'s side of an exchange.

    Args:
        wanted: int64[n, 4]: rank, global start, stop, and where the first of them goes in the
            rank's buffer; a rank's ranges fill its buffer.
        source: who holds the tokens.
    """
    pieces = source.pieces
    w, p = spread(*touched(wanted[:, 1], wanted[:, 2], pieces[:, 1:3]))
    start = np.maximum(wanted[w, 1], pieces[p, 1])
    count = np.minimum(wanted[w, 2], pieces[p, 2]) - start
    receiver, sender = wanted[w, 0], pieces[p, 0]
    at_receiver = wanted[w, 3] + start - wanted[w, 1]
    at_sender = pieces[p, 3] + start - pieces[p, 1]
    order = np.lexsort((at_receiver, receiver))
    out = order[sender[order] == rank]
    into = order[receiver[order] == rank]
    return Exchange(
        send=columns(receiver[out], at_sender[out], count[out]),
        recv=columns(sender[into], at_receiver[into], count[into]),
        places=columns(start[into], start[into] + count[into], at_receiver[into]),
        tokens=int(count[into].sum()),
    )


def _rolled(pieces: Ints, shift: int, total: int) -> Ints:
    """The ranges (rank, start, stop, offset) of ``pieces`` moved back by ``shift``, cut where they
    pass the start of the sequence."""
    shift %= max(total, 1)
    moved = pieces.copy()
    moved[:, 1:3] -= shift
    below, above = moved[moved[:, 1] < 0], moved[moved[:, 2] > 0]
    below, above = below.copy(), above.copy()
    below[:, 2] = np.minimum(below[:, 2], 0)
    below[:, 1:3] += total
    above[:, 3] += np.maximum(-above[:, 1], 0)
    above[:, 1] = np.maximum(above[:, 1], 0)
    return np.concatenate([above, below])
