"""Heads: how many bytes a token takes in them, and which of them each rank computes.

Ranks of a team share out the heads (Ulysses: Jacobs et al., arXiv:2309.14509, 2023). Out of 8 query
heads and 4 key heads, the ranks compute, in teams of

              2                 3                 8
    query     0 0 0 0 1 1 1 1   0 0 1 1 2 2 2 2   0  1  2  3  4  5  6  7
    key        0   0   1   1     0   1   2   2    0, 1  2, 3  4, 5  6, 7

Query head q reads key head q // (q_heads // kv_heads). This also holds for the heads of a share,
counted from its first ones, so that a kernel need not know about the others. So a share is some key
heads with all query heads that read them or, where there are more ranks than key heads, some of the
query heads that read one key head, which is sent to several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import NamedTuple, TypeVar

import numpy as np

from ..arrays import Ints

Count = TypeVar("Count", int, Ints)  # of one rank, or int64[P] of each


class Sizes(NamedTuple):
    """Query and key heads of a call, dims of a head, and bytes per element of q, k and v.

    The methods give bytes of one token, with as many heads as a rank computes; batch 1.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    itemsize: int

    @staticmethod
    def of(q_heads: int, kv_heads: int, head_dim: int, v_dim: int | None, itemsize: int) -> Sizes:
        """Sizes in which ``v_dim`` is ``head_dim`` where it is None."""
        return Sizes(q_heads, kv_heads, head_dim, head_dim if v_dim is None else v_dim, itemsize)

    @property
    def wide_itemsize(self) -> int:
        """Bytes per element of lse and of sums: fp32, or fp64 with fp64 inputs."""
        return max(self.itemsize, 4)

    def q_bytes(self, heads: Count) -> Count:
        """Bytes of a row of q."""
        return heads * (self.head_dim * self.itemsize)

    def kv_bytes(self, heads: Count) -> Count:
        """Bytes of a key and its value."""
        return heads * ((self.head_dim + self.v_dim) * self.itemsize)

    def result_bytes(self, heads: Count) -> Count:
        """Bytes of a row of the output, and its lse."""
        return heads * (self.v_dim * self.itemsize + self.wide_itemsize)

    def held_row_bytes(self, heads: Count) -> Count:
        """Bytes of a row, and of the wide sum of its results, with its lse."""
        return self.q_bytes(heads) + heads * (self.v_dim + 1) * self.wide_itemsize

    def merge_bytes(self, heads: Count) -> tuple[Count, Count]:
        """Bytes that a device reads and writes to merge a further call's result for a row with the
        earlier ones, in a forward and in a backward. In a backward, a call sums dout times out
        again, and clears and rounds its own wide sums of dq, which are then added to the earlier
        ones."""
        narrow, wide = self.itemsize, self.wide_itemsize
        forward = self.v_dim * (narrow + 2 * wide)
        backward = self.v_dim * 2 * narrow + self.head_dim * (2 * narrow + 4 * wide)
        return heads * forward, heads * backward


class TokenBytes(NamedTuple):
    """Bytes of one token, int64[P]: of the share of the heads that each rank attends; batch 1.

    Attributes:
        key_out, key_back: of a key and its value: to the rank that attends it, and home from it.
        row_out, row_back: the same for a row.
    """

    key_out: Ints
    key_back: Ints
    row_out: Ints
    row_back: Ints

    @staticmethod
    def forward(sizes: Sizes, heads: Ints) -> TokenBytes:
        """Keys and values go out; rows go out, their output and lse come back. ``heads``,
        int64[P, 2], are the query and key heads of each rank."""
        h, g = heads.T
        return TokenBytes(sizes.kv_bytes(g), 0 * g, sizes.q_bytes(h), sizes.result_bytes(h))

    @staticmethod
    def backward(
        sizes: Sizes, heads: Ints, home_itemsize: int, *, lse_gradient: bool = False
    ) -> TokenBytes:
        """k and v go out again, dk and dv come home. Rows of q, out and dout with their lse, and
        perhaps the gradient of lse, go out, and dq comes home. ``home_itemsize``: of gradients on
        their way home."""
        h, g = heads.T
        home = sizes._replace(itemsize=home_itemsize)
        row = sizes.q_bytes(h) + sizes.result_bytes(h)
        row = row + h * (sizes.v_dim * sizes.itemsize + lse_gradient * sizes.wide_itemsize)
        return TokenBytes(sizes.kv_bytes(g), home.kv_bytes(g), row, home.q_bytes(h))


def head_counts(title: str, heads: Sequence[int]) -> tuple[int, int]:
    """Query and key heads, from any two integers. Anything else raises a ValueError that begins
    with ``title``."""
    try:
        q_heads, kv_heads = map(index, heads)
    except (TypeError, ValueError):
        raise ValueError(
            f"{title}: heads must be two integers, the query and the key heads, got {heads!r}"
        ) from None
    return q_heads, kv_heads


def grouped_heads(title: str, heads: Sequence[int]) -> tuple[int, int]:
    """Query and key heads of a whole model. Raises a ValueError that begins with ``title`` for
    anything but two integers of which the second divides the first."""
    q_heads, kv_heads = head_counts(title, heads)
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"{title}: heads must be query heads and key heads that divide them, got "
            f"({q_heads}, {kv_heads})"
        )
    return q_heads, kv_heads


class HeadShare(NamedTuple):
    """Query heads q_start .. q_stop - 1 and key heads kv_start .. kv_stop - 1, one or more each."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def q_heads(self) -> int:
        """How many query heads."""
        return self.q_stop - self.q_start

    @property
    def kv_heads(self) -> int:
        """How many key heads."""
        return self.kv_stop - self.kv_start


@lru_cache(maxsize=256)
def head_shares(q_heads: int, kv_heads: int, team_size: int) -> tuple[HeadShare, ...]:
    """The heads of each rank of a team, in order.

    If there are at most as many ranks as key heads, key heads are assigned as evenly as possible.
    If there are more, ranks are assigned to key heads as evenly as possible, and the query heads of
    a key head to its ranks.

    Raises:
        ValueError: ``q_heads`` is not a multiple of ``kv_heads``, or is less than ``team_size``.
            One rank alone has whatever heads there are.
    """
    if team_size == 1:
        return (HeadShare(0, q_heads, 0, kv_heads),)
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key heads to be assigned to {team_size} ranks, "
            f"got {q_heads} and {kv_heads}"
        )
    if not 1 <= team_size <= q_heads:
        raise ValueError(f"team_size must be 1 to {q_heads}, the query heads, got {team_size}")
    group = q_heads // kv_heads
    if team_size <= kv_heads:
        return tuple(
            HeadShare(start * group, stop * group, start, stop)
            for start, stop in _even_ranges(kv_heads, team_size)
        )
    return tuple(
        HeadShare(kv * group + start, kv * group + stop, kv, kv + 1)
        for kv, (first, end) in enumerate(_even_ranges(team_size, kv_heads))
        for start, stop in _even_ranges(group, end - first)
    )


@lru_cache(maxsize=256)
def heads_of_ranks(q_heads: int, kv_heads: int, team_size: int, ranks: int) -> Ints:
    """int64[ranks, 2]: query and key heads that each rank computes, read-only; errors are those of
    :func:`head_shares`."""
    shares = head_shares(q_heads, kv_heads, team_size)
    of_team = np.array([[share.q_heads, share.kv_heads] for share in shares])
    heads = np.tile(of_team, (ranks // team_size, 1))
    heads.setflags(write=False)
    return heads


def largest_share(q_heads: int, kv_heads: int, team_size: int) -> HeadShare:
    """The heads of a team's rank with the most; errors are those of :func:`head_shares`."""
    return max(head_shares(q_heads, kv_heads, team_size), key=lambda share: share.q_heads)


def _even_ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """Ranges (start, stop) of 0 .. count - 1, of lengths that differ by one at most."""
    return list(pairwise(n * count // parts for n in range(parts + 1)))
