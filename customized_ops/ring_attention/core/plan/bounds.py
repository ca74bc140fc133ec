"""Bounds that no plan can beat, with proofs.

A report shows a plan's figures next to these, so that it is known what is left to gain. A bound on
bytes holds not only for this plan's choices, but for every layout with as many tokens on each rank
and every assignment with as many pairs on each rank. A row or a key of the mask is called a line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Ints, columns
from ..mask import AttnMask
from ..mask.intervals import spread
from ..mask.slices import HI, K0, K1, LO, Q0, Q1, Slices
from .heads import Sizes
from .plan_value import PlanValue

# The search cuts a cell into PARTS, and stops short of the exact minimum at MAX_CELLS cells.
PARTS = 8
MAX_CELLS = 1 << 18
# Stands for the cost of pairs that no number of rows admits.
IMPOSSIBLE = 1 << 60


@dataclass(frozen=True)
class Bounds:
    """The least that a plan's forward pass can have.

    Attributes:
        pairs: that the rank with the most computes.
        received: int64[P] bytes that each rank receives in order to compute its pairs.
        moved: int64[P] bytes that cross links for each rank's pairs: those that it receives, and
            the results of others' rows that it sends home.
    """

    pairs: int
    received: Ints
    moved: Ints

    @property
    def total(self) -> int:
        """Bytes that all ranks receive together."""
        return int(self.moved.sum())

    @property
    def busiest(self) -> int:
        """Bytes of the rank that receives most: at least any rank's bound, and at least the
        mean."""
        return max(int(self.received.max()), -(-self.total // len(self.moved)))


def lower_bounds(plan: PlanValue, sizes: Sizes) -> Bounds:
    """What ``plan.area`` and ``plan.forward_bytes`` cannot fall below, batch 1.

    Pairs. Each pair is computed by one team, so some team has at least the mean over teams, rounded
    up.

    Bytes. A rank computes all its pairs for its one share of the heads. It holds that share of its
    own tokens; of every other token that its pairs touch, the share arrives once:
    :func:`least_cost`. So this holds with heads split, too, among plans that split them the same
    way. For a foreign row, q arrives and output and lse are sent home, and what all ranks receive
    is the sum of both over the ranks that compute.
    """
    heads = plan.heads_of_ranks(sizes.q_heads, sizes.kv_heads)
    rows, keys = lines(plan.mask)
    ranks = np.array([plan.area, plan.q_layout.sizes, plan.k_layout.sizes])
    received, moved = np.zeros_like(ranks[:2])
    for h, g in np.unique(heads, axis=0).tolist():
        row_in, row_back, key_in = sizes.q_bytes(h), sizes.result_bytes(h), sizes.kv_bytes(g)
        like = (heads == (h, g)).all(axis=1)
        area, q_held, k_held = ranks[:, like]
        received[like] = least_cost(rows, keys, area, q_held, k_held, row_in, key_in)
        moved[like] = least_cost(rows, keys, area, q_held, k_held, row_in + row_back, key_in)
    teams = plan.group_size // plan.team_size
    return Bounds(-(-plan.mask.area // teams), received, moved)


def least_cost(
    rows: Lines,
    keys: Lines,
    pairs: Ints,
    rows_held: Ints,
    keys_held: Ints,
    row_cost: int,
    key_cost: int,
) -> Ints:
    """The least cost of the tokens that each rank lacks for the pairs it computes.

    Let a rank's A pairs touch R rows and C keys. A row has at most min(its sum in the mask, C) of
    them, so A is at most the sum of that over R rows, and most over the R rows with the largest
    sums; likewise over the C keys with the largest sums, at most R each. The rank lacks at least
    R - (rows held) rows and C - (keys held) keys. So the cheapest (R, C) that admits A by both sums
    is a lower bound. R * C >= A follows from either, so this is never below the bound by squares,
    R + C >= 2 sqrt(A) (Irony, Toledo, Tiskin, 2004, for matrix products).

    The minimum is searched over C by halving: the fewest rows for C keys fall as C grows, so in a
    cell lo < C <= hi the cost is at least that of the rows for hi and lo + 1 keys. Cells that
    cannot hold the minimum are dropped, the others cut until they are one key wide. Where too many
    are left, the least of their lower bounds is returned, which is still a bound.

    Args:
        rows, keys: of the mask, see :func:`lines`.
        pairs, rows_held, keys_held: int64[P].
        row_cost, key_cost: of one row and of one key, integers.
    Returns:
        int64[P], in the unit of the costs.
    """
    ranks = columns(pairs, rows_held, np.minimum(keys_held, keys.count))
    cases, which = np.unique(ranks, axis=0, return_inverse=True)
    area, rows_held, keys_held = cases.T
    best = np.where(area == 0, 0, IMPOSSIBLE)
    # Fewer keys than are held save nothing: start with those held alone, and with all above them.
    x = np.flatnonzero(area)
    x = np.concatenate([x, x[keys_held[x] < keys.count]])
    first = np.arange(len(x)) < (area > 0).sum()
    low = np.where(first, keys_held[x] - 1, keys_held[x])
    high = np.where(first, keys_held[x], keys.count)
    while len(x):
        fewest = _fewest_rows(rows, keys, area[x], high)
        cost = row_cost * np.maximum(fewest - rows_held[x], 0)
        cost = np.where(fewest > rows.count, IMPOSSIBLE, cost)
        np.minimum.at(best, x, cost + key_cost * (high - keys_held[x]))
        least = cost + key_cost * np.maximum(low + 1 - keys_held[x], 0)
        left = (high - low > 1) & (least < best[x])
        if left.sum() * PARTS > MAX_CELLS:
            np.minimum.at(best, x[left], least[left])
            break
        x, low, high = _cut(x[left], low[left], high[left])
    return best[which.reshape(-1)]


def _fewest_rows(rows: Lines, keys: Lines, area: Ints, touched: Ints) -> Ints:
    """Fewest rows that admit ``area`` pairs on ``touched`` keys by both sums; one more than there
    are rows if no number does."""
    low = rows.fewest(area, touched)
    high = np.full_like(low, rows.count + 1)
    while (low < high).any():
        middle = (low + high) // 2
        enough = keys.most(touched, np.minimum(middle, rows.count)) >= area
        high = np.where(enough & (low < high), middle, high)
        low = np.where(~enough & (low < high), middle + 1, low)
    return low


def _cut(x: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Each cell in up to PARTS cells."""
    parts = np.minimum(high - low, PARTS)
    n, part = spread(np.zeros_like(parts), parts)
    width = (high - low)[n]
    ends = (low[n] + width * end // parts[n] for end in (part, part + 1))
    return x[n], *ends


@dataclass(frozen=True)
class Lines:
    """How many pairs the rows, or the keys, of a mask have.

    Attributes:
        count: number of lines.
        before: int64[count + 1]: pairs of the first n lines, the largest first.
        as_large: int64[m]: entry n is the number of lines with at least n pairs; m - 1 is the
            length of a line.
    """

    count: int
    before: Ints
    as_large: Ints

    @staticmethod
    def of(sums: Ints, length: int) -> Lines:
        """From the pairs of each line, int64[count]."""
        smaller = np.cumsum(np.bincount(sums, minlength=length + 1))[:length]
        as_large = len(sums) - np.concatenate([[0], smaller])
        return Lines(len(sums), most_pairs(sums), as_large)

    def most(self, count: Ints, cap: Ints) -> Ints:
        """Pairs of the ``count`` largest lines, at most ``cap`` of each."""
        capped = np.minimum(count, self.as_large[cap])
        return capped * cap + self.before[count] - self.before[capped]

    def fewest(self, pairs: Ints, cap: Ints) -> Ints:
        """The least count for which ``most(count, cap) >= pairs``; ``self.count + 1`` if none."""
        capped = self.as_large[cap]
        beyond = np.searchsorted(self.before, pairs - capped * cap + self.before[capped])
        return np.where(capped * cap >= pairs, -(-pairs // np.maximum(cap, 1)), beyond)


def lines(mask: AttnMask) -> tuple[Lines, Lines]:
    """The mask's rows and keys."""
    return (
        Lines.of(row_sums(mask.slices, mask.q_len), mask.k_len),
        Lines.of(key_sums(mask.slices, mask.k_len), mask.q_len),
    )


def most_pairs(sums: Ints) -> Ints:
    """int64[n + 1]: the most pairs that 0, 1, 2, ... lines have, from the pairs of each line."""
    return np.append(0, np.cumsum(np.sort(sums)[::-1]))


def key_sums(slices: Slices, k_len: int) -> Ints:
    """int64[k_len]: pairs of each key; see :func:`row_sums`."""
    across = slices[:, [K0, K1, Q0, Q1, HI, LO]] * np.array([1, 1, 1, 1, -1, -1])
    return row_sums(across, k_len)


def row_sums(slices: Slices, q_len: int) -> Ints:
    """int64[q_len]: pairs of each row, without a dense mask.

    Row i of a slice has min(k1 - 1, i + hi) - max(k0, i + lo) + 1 pairs: from row to row the first
    term grows by 1 until it meets k1 - 1, and the second from where it leaves k0.

    Args:
        slices: normalised int64[n, 6], disjoint.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    slope = np.zeros(q_len + 2, dtype=np.int64)  # change of the growth, at each row
    jump = np.zeros(q_len + 2, dtype=np.int64)
    last = q1 - 1
    for at, by in (
        (q0 + 1, 1),
        (np.clip(k1 - 1 - hi, q0, last) + 1, -1),
        (np.clip(k0 - lo, q0, last) + 1, -1),
        (q1, 1),
    ):
        np.add.at(slope, at, by)
    for at, row, sign in ((q0, q0, 1), (q1, last, -1)):
        pairs = np.minimum(k1 - 1, row + hi) - np.maximum(k0, row + lo) + 1
        np.add.at(jump, at, sign * pairs)
    return np.cumsum(jump + np.cumsum(slope))[:q_len]
