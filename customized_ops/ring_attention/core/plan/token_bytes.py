"""Bytes of a token that moves, in either pass, out to where it is attended and back home."""

from __future__ import annotations

from typing import NamedTuple

from ..arrays import Ints
from .heads import Sizes


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
