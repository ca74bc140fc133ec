"""What a rank sends and receives where tokens go from one layout to another, or to the ranks that
want them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...arrays import Ints, columns
from ...layout import Layout
from ...mask.intervals import spread, touched
from .exchange import Exchange


@lru_cache(maxsize=64)
def relayout(source: Layout, target: Layout, shift: int, rank: int) -> Exchange:
    """``rank``'s side of moving tokens from ``source`` to ``target``.

    Args:
        shift: where ``target`` has token i, token i - shift arrives, modulo the length.
    """
    return wanted_exchange(_rolled(target.pieces, shift, target.total), source, rank)


@lru_cache(maxsize=64)
def gather(source: Layout, rank: int) -> Exchange:
    """``rank``'s side of an exchange in which every rank gets all tokens, in order."""
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
    rank, start, stop, offset = np.concatenate([pieces, pieces + np.array([0, total, total, 0])]).T
    first, last = np.maximum(start - shift, 0), np.minimum(stop - shift, total)
    moved = columns(rank, first, last, offset + first - (start - shift))
    return moved[first < last]
