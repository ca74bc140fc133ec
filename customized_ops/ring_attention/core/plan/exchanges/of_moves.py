"""From moves of tokens to what a rank, or every rank at once, sends and receives in each step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ...arrays import Ints, columns
from ...mask.intervals import joined
from ..moves import RECV, SEND, SEND_OFFSET, STEP, TOKEN0, TOKEN1, Moves, to_each
from .exchange import NO_RANGES, Exchange


def sender_order(moves: Moves) -> Ints:
    """int64[n]: rises from one sender to the next, as their tokens lie in a buffer of messages; a
    rank's own tokens come last."""
    sender, receiver = moves[:, SEND], moves[:, RECV]
    return np.where(sender == receiver, np.iinfo(np.int64).max, sender)


def exchanges(
    moves: Moves, steps: int, rank: int, team_size: int, *, local: bool, by_sender: bool = False
) -> list[Exchange]:
    """``rank``'s side of ``moves`` in each of ``steps`` steps.

    Args:
        local: whether what the rank holds itself is received too, as a copy.
        by_sender: whether tokens are received in :func:`sender_order`; else in global order.
    """
    mine = moves[:, RECV] == rank // team_size
    if not local:
        mine &= moves[:, SEND] != rank
    out, peers = to_each(moves[moves[:, SEND] == rank], team_size, local=local)
    return _by_step(moves[mine], out, peers, steps, team_size, by_sender=by_sender)


def exchanges_of_all(
    rows: Moves,
    keys: Moves,
    steps: int,
    ranks: int,
    team_size: int,
    *,
    local: bool,
    as_held: bool = False,
) -> list[list[Exchange]]:
    """For every rank, :func:`exchanges` of rows, in one step, and of keys, worked out together.
    The moves are those of all ranks, and ``local`` is for keys. With ``as_held``, tokens of each
    sender, and then a rank's own, are received in the order in which they are held."""
    of_rows = to_each(rows, team_size, local=False)
    of_keys = to_each(keys, team_size, local=local)
    into, to = map(np.concatenate, zip(of_rows, of_keys, strict=True))
    into[len(of_rows[0]) :, STEP] += 1  # after the rows
    out, count = into.copy(), 1 + steps
    into[:, STEP] += to * count
    out[:, STEP] += out[:, SEND] * count
    found = _by_step(into, out, to, ranks * count, team_size, as_held=as_held)
    return [found[rank * count : (rank + 1) * count] for rank in range(ranks)]


def _by_step(
    into: Moves,
    out: Moves,
    peers: Ints,
    steps: int,
    team_size: int,
    *,
    by_sender: bool = False,
    as_held: bool = False,
) -> list[Exchange]:
    """The exchange of each step, from what is received and what is sent; ``peers`` are the ranks
    that it is sent to. For ``by_sender`` see :func:`exchanges`, for ``as_held``
    :func:`exchanges_of_all`."""
    if len(into) + len(out) == 0:
        return [Exchange(NO_RANGES, NO_RANGES, NO_RANGES, 0, team_size)] * steps
    numbers = np.arange(steps + 1)
    sender = sender_order(into) if by_sender or as_held else np.zeros(len(into), dtype=np.int64)
    within = SEND_OFFSET if as_held else TOKEN0
    got = into[np.lexsort((into[:, within], sender, into[:, STEP]))]
    at = got[:, STEP]
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
    order = np.lexsort((out[:, within], peers, out[:, STEP]))
    given = out[order]
    send = columns(peers[order], given[:, SEND_OFFSET], given[:, TOKEN1] - given[:, TOKEN0])
    of_send = given[:, STEP].searchsorted(numbers)
    cuts = (each.tolist() for each in (of_send, of_recv, of_places, begin))
    return [
        Exchange(send[s0:s1], recv[r0:r1], places[p0:p1], b1 - b0, team_size)
        for (s0, s1), (r0, r1), (p0, p1), (b0, b1) in zip(*map(pairwise, cuts), strict=True)
    ]
