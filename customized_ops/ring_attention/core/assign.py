"""Which rank computes which query rows.

Rows that a rank holds but does not compute travel to the rank that does, and their output comes
back. With contiguous shards and a causal mask the last rank holds most of the work; giving rows
away is what balances it without moving keys twice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .layout import Layout
from .mask import AttnMask
from .slices import area_before

# Columns of an assignment: rank that computes, rank that holds, global rows, offset at the holder.
Assignment = npt.NDArray[np.int64]  # [n, 5]
COMPUTE, OWNER, ROW0, ROW1, OWNER_OFFSET = range(5)

# Imbalance left alone: moving rows costs messages, and a few percent is below what they cost.
TOLERANCE = 0.02


def owner_computes(layout: Layout) -> Assignment:
    """Every rank computes the rows it holds."""
    pieces = layout.pieces
    return pieces[:, [0, 0, 1, 2, 3]]


def as_laid_out(layout: Layout, wanted: Layout) -> Assignment:
    """Rows are held as ``layout`` says and computed as ``wanted`` says."""
    held, comp = layout.pieces, wanted.pieces
    row0 = np.maximum(held[:, None, 1], comp[None, :, 1])
    row1 = np.minimum(held[:, None, 2], comp[None, :, 2])
    h, c = np.nonzero(row0 < row1)
    offset = held[h, 3] + row0[h, c] - held[h, 1]
    return np.stack([comp[c, 0], held[h, 0], row0[h, c], row1[h, c], offset], axis=1)


def balanced(mask: AttnMask, layout: Layout) -> Assignment:
    """Owner computes, but ranks with more than the mean area give rows to ranks with less.

    Surpluses and deficits are matched largest first, so that at most group_size - 1 transfers are
    made, and each is cut from one end of a piece: the end where the rows are denser, because then
    fewer rows move. Cuts fall on multiples of a granule, to suit kernels' tiles.
    """
    assignment = owner_computes(layout)
    area = _area_per_rank(mask, assignment, layout.group_size)
    mean = area.sum() / layout.group_size
    if area.max() <= (1 + TOLERANCE) * mean:
        return assignment
    granule = _granule(max(layout.sizes))
    rows = [list(row) for row in assignment.tolist()]
    surplus = {r: a - mean for r, a in enumerate(area) if a > mean}
    deficit = {r: mean - a for r, a in enumerate(area) if a < mean}
    while surplus and deficit:
        giver = max(surplus, key=lambda r: (surplus[r], r))
        taker = max(deficit, key=lambda r: (deficit[r], -r))
        amount = min(surplus[giver], deficit[taker])
        given = 0.0
        if amount > TOLERANCE / 2 * mean:
            given = _give(mask, rows, giver, taker, amount, granule)
        surplus[giver] -= amount
        deficit[taker] -= amount
        if given == 0 or surplus[giver] <= TOLERANCE / 2 * mean:
            del surplus[giver]
        if given == 0 or deficit[taker] <= TOLERANCE / 2 * mean:
            del deficit[taker]
    moved = np.array(sorted(rows, key=lambda row: row[ROW0]), dtype=np.int64)
    after = _area_per_rank(mask, moved, layout.group_size)
    return moved if after.max() < area.max() else assignment


def _area_per_rank(mask: AttnMask, assignment: Assignment, ranks: int) -> npt.NDArray[np.float64]:
    area = np.diff(area_before(mask.slices, assignment[:, [ROW0, ROW1]].reshape(-1)))[::2]
    per_rank = np.bincount(assignment[:, COMPUTE], weights=area, minlength=ranks)
    return per_rank.astype(np.float64)


def _granule(tokens_per_rank: int) -> int:
    """Largest power of two up to 128 that still cuts a rank's tokens to about 1.5%."""
    granule = 128
    while granule > 1 and granule * 64 > tokens_per_rank:
        granule //= 2
    return granule


def _give(
    mask: AttnMask, rows: list[list[int]], giver: int, taker: int, amount: float, granule: int
) -> float:
    """Move rows worth about ``amount`` pairs between ranks, in place; returns the pairs moved."""
    given = 0.0
    own = [row for row in rows if row[COMPUTE] == giver and row[OWNER] == giver]
    for row in sorted(own, key=lambda row: -row[ROW1]):
        want = amount - given
        if want < amount * TOLERANCE:
            break
        row0, row1 = row[ROW0], row[ROW1]
        grid = np.unique(np.clip(np.arange(row0, row1 + granule, granule), row0, row1))
        before = area_before(mask.slices, grid)
        whole = float(before[-1] - before[0])
        if whole == 0:
            continue
        tail = int(np.abs((before[-1] - before) - want).argmin())
        head = int(np.abs((before - before[0]) - want).argmin())
        if row1 - grid[tail] <= grid[head] - row0:
            cut0, cut1, pairs = int(grid[tail]), row1, before[-1] - before[tail]
        else:
            cut0, cut1, pairs = row0, int(grid[head]), before[head] - before[0]
        if cut0 >= cut1:
            continue
        rows.remove(row)
        for part0, part1, rank in ((row0, cut0, giver), (cut0, cut1, taker), (cut1, row1, giver)):
            if part0 < part1:
                rows.append([rank, giver, part0, part1, row[OWNER_OFFSET] + part0 - row0])
        given += float(pairs)
    return given
