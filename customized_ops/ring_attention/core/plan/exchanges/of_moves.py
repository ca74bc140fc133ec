"""From moves of tokens to what a rank, or every rank at once, sends and receives in each step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...arrays import Ints, columns
from ...mask.intervals import joined
from ..moves import RECV, SEND, SEND_OFFSET, TOKEN0, TOKEN1, Moves
from .exchange import NO_RANGES, Exchange


def exchanges(
    moves: Moves, step: Ints, steps: int, rank: int, team_size: int, *, local: bool
) -> list[Exchange]:
    """``rank``'s side of ``moves`` in each of ``steps`` steps, received in global order.

    Args:
        step: int64[n], that of each move.
        local: whether what the rank holds itself is received too, as a copy.
    """
    mine = moves[:, RECV] == rank // team_size
    if not local:
        mine &= moves[:, SEND] != rank
    sends = moves[:, SEND] == rank
    out, at, peers = _to_each(moves[sends], step[sends], team_size, local=local)
    return _by_step((moves[mine], step[mine]), (out, at), peers, steps, team_size)


def exchanges_of_all(
    rows: Moves, keys: Moves, step: Ints, steps: int, ranks: int, team_size: int, *, local: bool
) -> list[list[Exchange]]:
    """For every rank, :func:`exchanges` of rows, in one step, and of keys, worked out together.
    The moves are those of all ranks, and ``local`` is for keys."""
    at_once = np.zeros(len(rows), dtype=np.int64)
    of_rows = _to_each(rows, at_once, team_size, local=False)
    of_keys = _to_each(keys, 1 + step, team_size, local=local)
    every, at, to = map(np.concatenate, zip(of_rows, of_keys, strict=True))
    count = 1 + steps
    into, out = (every, to * count + at), (every, every[:, SEND] * count + at)
    found = _by_step(into, out, to, ranks * count, team_size)
    return [found[rank * count : (rank + 1) * count] for rank in range(ranks)]


def _to_each(moves: Moves, step: Ints, team_size: int, *, local: bool) -> tuple[Moves, Ints, Ints]:
    """The moves to each rank of the teams that receive them, their steps, and these ranks."""
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
    """The exchange of each step, from what is received and what is sent, each with its steps;
    ``peers`` are the ranks that it is sent to."""
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
