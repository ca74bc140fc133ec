"""Slices as block-sparse kernels take them: lists of blocks, and intervals of keys for each row.

Blocks of 2 x 2 tokens, causal, the last key attended by the last row alone:

    # . . . . |     row block  partial  full        key block  partial  full
    # # . . . |     0          [0]      []          0          [0]      [1, 2]
    # # # . . |     1          [1]      [0]         1          [1]      [2]
    # # # # . |     2          []       [0, 1, 2]   2          []       [2]
    # # # # # |

A block that extends past the end of q or k is full if its part within them is attended.

No torch here: lists are made on the host, once for a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...arrays import Ints
from ...mask.intervals import spread
from ...mask.slices import HI, K0, K1, LO, Q0, Q1, Slices, areas, tighten


@dataclass(frozen=True, eq=False)
class BlockList:
    """For each block of one side, blocks of the other."""

    counts: npt.NDArray[np.int32]  # [blocks], how many
    # [blocks, most], which ones, ascending; 0 beyond the count; most is the largest count, or 1.
    indices: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BlocksMet:
    """The blocks that each block of rows, or of keys, meets: attended in part, or whole."""

    partial: BlockList
    full: BlockList


def block_lists(
    slices: Slices, q_len: int, k_len: int, block_q: int, block_k: int
) -> tuple[BlocksMet, BlocksMet]:
    """Lists for each block of ``block_q`` rows, and for each block of ``block_k`` keys. The slices,
    int64[n, 6], are normalised, disjoint and within ``q_len`` rows and ``k_len`` keys."""
    row_blocks, key_blocks = -(-q_len // block_q), -(-k_len // block_k)
    strips = _strips(slices, block_q)
    first, stop = strips[:, K0] // block_k, -(-strips[:, K1] // block_k)
    whole0, whole1 = _whole_blocks(strips, q_len, k_len, block_q, block_k)
    row_block = strips[:, Q0] // block_q

    # Areas are needed only where a strip covers a part of a block: several may make it full.
    strip, key_block = spread(np.concatenate([first, whole1]), np.concatenate([whole0, stop]))
    strip %= max(1, len(strips))
    pieces = strips[strip]
    pieces[:, K0] = np.maximum(pieces[:, K0], key_block * block_k)
    pieces[:, K1] = np.minimum(pieces[:, K1], (key_block + 1) * block_k)
    touched, which = np.unique(row_block[strip] * key_blocks + key_block, return_inverse=True)
    attended = np.bincount(which, areas(tighten(pieces)), minlength=len(touched))
    i, j = np.divmod(touched, max(1, key_blocks))
    height = np.minimum(block_q, q_len - i * block_q)
    complete = attended == height * np.minimum(block_k, k_len - j * block_k)

    strip, key_block = spread(whole0, whole1)
    full_i = np.concatenate([row_block[strip], i[complete]])
    full_j = np.concatenate([key_block, j[complete]])
    i, j = i[~complete], j[~complete]
    return (
        BlocksMet(_listed(i, j, row_blocks), _listed(full_i, full_j, row_blocks)),
        BlocksMet(_listed(j, i, key_blocks), _listed(full_j, full_i, key_blocks)),
    )


def blocks_touched(
    slices: Slices, q_len: int, k_len: int, block_q: int, block_k: int
) -> tuple[int, int]:
    """How many blocks normalised slices attend in part, and how many whole; a block that several
    slices touch counts once for each."""
    strips = _strips(slices, block_q)
    touched = int((-(-strips[:, K1] // block_k) - strips[:, K0] // block_k).sum())
    first, stop = _whole_blocks(strips, q_len, k_len, block_q, block_k)
    whole = int((stop - first).sum())
    return touched - whole, whole


def row_intervals(slices: Slices, q_len: int, most: int) -> npt.NDArray[np.int32] | None:
    """The keys of each row as ascending, disjoint intervals that do not touch.

    Args:
        slices: int64[n, 6], normalised and disjoint, within ``q_len`` rows.
    Returns:
        int32[q_len, n, 2] of (start, stop), (0, 0) where a row has fewer than n; n is the largest
        number of intervals in a row, and at least 1. None if that is more than ``most``.
    """
    heads, order = _slices_by_rows(slices, q_len)
    of_row = np.repeat(np.arange(len(heads) - 1), np.diff(heads))
    rows = np.arange(q_len)
    found = np.zeros((q_len, most, 2), dtype=np.int32)
    taken = np.zeros(q_len, dtype=np.int64)  # intervals that a row has so far
    end = np.full(q_len, -1, dtype=np.int64)  # of a row's last one
    for nth in order.T:
        which = nth[of_row]
        here = np.flatnonzero(which >= 0)
        _, _, k0, k1, lo, hi = slices[which[here]].T
        start, stop = np.maximum(k0, rows[here] + lo), np.minimum(k1, rows[here] + hi + 1)
        apart = start != end[here]
        if (taken[here] + apart).max(initial=0) > most:
            return None
        new = here[apart]
        found[new, taken[new], 0] = start[apart]
        taken[new] += 1
        found[here, taken[here] - 1, 1] = stop
        end[here] = stop
    return found[:, : max(1, taken.max(initial=1))]


def intervals_in_part(
    slices: Slices, q_len: int, of_rows: BlocksMet, block_q: int, block_k: int, most: int
) -> npt.NDArray[np.int32] | None:
    """:func:`row_intervals` or, where these are too many, those that meet a block attended in part.
    A kernel asks a function of ours only about such blocks; it attends others whole or not at all.

    Args:
        of_rows: what :func:`block_lists` gives for blocks of rows, of these slices and block sizes.
    """
    found = row_intervals(slices, q_len, most)
    if found is not None:
        return found
    strips, partial = _strips(slices, block_q), of_rows.partial
    # Blocks get ascending numbers, larger for the next block of rows than for any of this one.
    numbers = (np.arange(len(partial.counts)) << 32)[:, None] + partial.indices
    in_part = numbers[np.arange(numbers.shape[1]) < partial.counts[:, None]]
    at = strips[:, Q0] // block_q << 32
    first = np.searchsorted(in_part, at + strips[:, K0] // block_k)
    stop = np.searchsorted(in_part, at - (-strips[:, K1] // block_k))
    return row_intervals(strips[first < stop], q_len, most)


def _strips(slices: Slices, block_q: int) -> Slices:
    """The slices cut at every ``block_q`` rows, normalised."""
    which, block = spread(slices[:, Q0] // block_q, -(-slices[:, Q1] // block_q))
    strips = slices[which]
    strips[:, Q0] = np.maximum(strips[:, Q0], block * block_q)
    strips[:, Q1] = np.minimum(strips[:, Q1], (block + 1) * block_q)
    return tighten(strips)


def _whole_blocks(
    strips: Slices, q_len: int, k_len: int, block_q: int, block_k: int
) -> tuple[Ints, Ints]:
    """The key blocks that each strip covers wholly; if none, the empty range at its first block."""
    q0, q1 = strips[:, Q0], strips[:, Q1]
    # Keys that every row attends: from the last row's first key to the first row's last key.
    start = np.maximum(strips[:, K0], q1 - 1 + strips[:, LO])
    stop = np.minimum(strips[:, K1], q0 + strips[:, HI] + 1)
    whole0 = -(-start // block_k)
    whole1 = np.where(stop == k_len, -(-stop // block_k), stop // block_k)
    height = np.minimum(block_q, q_len - q0 // block_q * block_q)
    none = (q1 - q0 < height) | (whole1 <= whole0)
    first = strips[:, K0] // block_k
    return np.where(none, first, whole0), np.where(none, first, whole1)


def _listed(of: Ints, other: Ints, blocks: int) -> BlockList:
    """Pairs of blocks as lists of ``other`` for each ``of``."""
    order = np.lexsort((other, of))
    counts, indices = _table(of[order], other[order], blocks, empty=0)
    return BlockList(counts.astype(np.int32), indices.astype(np.int32))


def _table(of: Ints, values: Ints, length: int, *, empty: int) -> tuple[Ints, Ints]:
    """Values grouped by where they belong, ``of``, which ascends: how many, int64[length], and
    which ones, [length, most or 1], filled up with ``empty``."""
    counts = np.bincount(of, minlength=length)
    table = np.full((length, max(1, counts.max(initial=0))), empty)
    table[of, np.arange(len(of)) - (np.cumsum(counts) - counts)[of]] = values
    return counts, table


def _slices_by_rows(slices: Slices, q_len: int) -> tuple[Ints, Ints]:
    """Runs of rows that the same slices cover, int64[runs + 1] bounds, and the slices of each run
    in the order of their keys, filled up with -1.

    The order holds for the whole run: from row to row a slice's bounds move by one key at most, so
    disjoint ones cannot pass one another.
    """
    heads = np.unique(np.concatenate([slices[:, Q0], slices[:, Q1], [0, q_len]]))
    which, run = spread(*np.searchsorted(heads, slices[:, [Q0, Q1]].T))
    start = np.maximum(slices[which, K0], heads[run] + slices[which, LO])
    by_key = np.lexsort((start, run))
    return heads, _table(run[by_key], which[by_key], len(heads) - 1, empty=-1)[1]
