"""Tables of token ranges, int64[n, 3] of rank, start, stop, which layouts are made of.

A table lists ranks one after another, and a rank's ranges in its local order.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Ints, columns
from ..mask.intervals import runs
from .layout_arguments import LayoutError


def even_bounds(total: int, parts: int) -> Ints:
    """int64[parts + 1]: bounds of parts of ceil(total / parts) tokens; the last are shorter or
    empty."""
    return np.minimum(np.arange(parts + 1) * -(-total // parts), total)


def in_order(bounds: Ints) -> Ints:
    """Rank r holds from ``bounds[r]`` to ``bounds[r + 1]``."""
    return columns(np.arange(len(bounds) - 1), bounds[:-1], bounds[1:])


def front_and_end(bounds: Ints) -> Ints:
    """Rank r holds two chunks of each document: chunk r from the front, then chunk r from the end.

    Args:
        bounds: int64[documents, 2 * group_size + 1] of each document's chunks.
    """
    rank = np.arange(bounds.shape[1] // 2)
    chunk = columns(rank, 2 * len(rank) - 1 - rank)
    start, stop = (bounds[:, chunk + n].transpose(1, 0, 2) for n in (0, 1))
    ranks = np.broadcast_to(rank[:, None, None], start.shape)
    return np.stack([ranks, start, stop], axis=-1).reshape(-1, 3)


def of_chunks(total: int, chunk: int, rank_of: Ints) -> Ints:
    """Chunk n, of ``chunk`` tokens, is on rank ``rank_of[n]``; the last chunk may be shorter."""
    order = np.argsort(rank_of, kind="stable")
    start = order * chunk
    return columns(rank_of[order], start, np.minimum(start + chunk, total))


def joined(table: Ints) -> Ints:
    """``table`` without empty ranges, and with ranges of a rank that continue one another merged.

    Raises:
        LayoutError: a range ends before it starts.
    """
    if (table[:, 2] < table[:, 1]).any():
        rank, start, stop = table[table[:, 2] < table[:, 1]][0].tolist()
        raise LayoutError(f"range ({start}, {stop}) of rank {rank} ends before it starts")
    rank, start, stop = table[table[:, 1] < table[:, 2]].T
    apart = (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    heads, lasts = runs(apart, len(rank))
    return columns(rank[heads], start[heads], stop[lasts])


def by_start(table: Ints) -> Ints:
    """int64[n, 4]: rank, start, stop, offset among the rank's own tokens; sorted by start."""
    rank, start, stop = table.T
    before = np.cumsum(stop - start) - (stop - start)
    offset = before - before[np.searchsorted(rank, rank)] if len(rank) else before
    return columns(rank, start, stop, offset)[np.argsort(start, kind="stable")]


def check_tiling(pieces: Ints) -> None:
    """Check that ``pieces`` (see :func:`by_start`) hold each token from 0 on exactly once.

    Raises:
        LayoutError: a token is left out or held twice; names the first such token.
    """
    due = np.concatenate([[0], pieces[:-1, 2]])[: len(pieces)]
    wrong = np.flatnonzero(pieces[:, 1] != due)
    if len(wrong) == 0:
        return
    at = int(wrong[0])
    rank, start, stop = pieces[at, :3].tolist()
    held = f"range ({start}, {stop}) of rank {rank}"
    if start < 0:
        raise LayoutError(f"{held} starts below 0")
    if start > due[at]:
        raise LayoutError(f"no rank holds token {due[at]}; the next one held is in {held}")
    raise LayoutError(f"token {start} is held twice: by rank {pieces[at - 1, 0]} and in {held}")
