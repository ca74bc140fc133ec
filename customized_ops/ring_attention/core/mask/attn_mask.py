"""Attention masks: disjoint lists of band slices (see :mod:`.slices`).

:class:`AttnMask` is what users make. Here are its dense and packed masks; named patterns come from
:mod:`.patterns`, those of shared prefixes from :mod:`.prefix_trees`, other forms of masks from
:mod:`.conversions`, and what every mask can do from :mod:`.mask_value`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import columns
from .conversions import Conversions
from .mask_arguments import MaskError, count, cumulative, flag, reach, window_reach
from .patterns import Patterns
from .prefix_trees import PrefixTrees
from .slices import HI, K0, K1, LO, UNBOUNDED, Slices

__all__ = ["AttnMask", "MaskError"]


class AttnMask(Patterns, PrefixTrees, Conversions):
    """Which (query, key) pairs attend, over whole sequences.

    Attributes:
        slices: normalised, disjoint int64[n, 6]; read-only.
        q_len, k_len: tokens in the query and the key sequence.

    ``AttnMask(slices, q_len, k_len)`` is :meth:`from_slices`: it checks and copies the slices. Two
    masks are equal when their lengths and slices are. ``print(mask.picture())`` shows one.
    """

    @staticmethod
    def full(q_len: int, k_len: int | None = None) -> AttnMask:
        """Every query sees every key.

            AttnMask.full(2, 3)
            x x x
            x x x

        Args:
            q_len, k_len: tokens; ``k_len`` is ``q_len`` if None.
        Raises:
            MaskError: a negative length, or not an integer.
        """
        return AttnMask.dense(q_len, k_len)

    @staticmethod
    def causal(q_len: int, k_len: int | None = None) -> AttnMask:
        """Each query sees the keys up to its own; the last query sees the last key.

            AttnMask.causal(4)
            x . . .
            x x . .
            x x x .
            x x x x

            AttnMask.causal(2, 4)
            x x x .
            x x x x

        Args:
            q_len, k_len: tokens; ``k_len`` is ``q_len`` if None.
        Raises:
            MaskError: a negative length, or not an integer.
        """
        return AttnMask.dense(q_len, k_len, causal=True)

    @staticmethod
    def sliding_window(n: int, left: int, right: int) -> AttnMask:
        """Each token sees ``left`` tokens before and ``right`` tokens after it.

            AttnMask.sliding_window(5, left=2, right=1)
            x x . . .
            x x x . .
            x x x x .
            . x x x x
            . . x x x

        Longformer, Beltagy et al., arXiv:2004.05150.

        Args:
            n: tokens.
            left, right: tokens beside its own; -1 for all.
        Raises:
            MaskError: ``n`` is negative, left or right is below -1, or not integers.
        """
        sides = reach("left", left), reach("right", right)
        return AttnMask.dense(count("n", n), window=sides)

    @staticmethod
    def dense(
        q_len: int,
        k_len: int | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
    ) -> AttnMask:
        """One sequence, in flash-attn's terms.

        Full, causal and sliding-window masks; the diagonal ends in the bottom right corner when the
        lengths differ. ``window=(left, right)`` keeps ``-left <= j - i <= right`` around it, -1
        means unbounded, and ``causal`` sets right to 0.

            AttnMask.dense(4, window=(1, 1))
            x x . .
            x x x .
            . x x x
            . . x x

            AttnMask.dense(4, causal=True, window=(2, -1))
            x . . .
            x x . .
            x x x .
            . x x x

        Args:
            q_len, k_len: tokens; ``k_len`` is ``q_len`` if None.
        Raises:
            MaskError: a negative length, a window below -1, or another type than shown.
        """
        q_len = count("q_len", q_len)
        k_len = q_len if k_len is None else count("k_len", k_len)
        return AttnMask.varlen([0, q_len], [0, k_len], causal=causal, window=window)

    @staticmethod
    def varlen(
        cu_seqlens_q: Sequence[int] | npt.NDArray[np.integer],
        cu_seqlens_k: Sequence[int] | npt.NDArray[np.integer] | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        global_tokens: int = 0,
    ) -> AttnMask:
        """Packed documents: document n's queries see document n's keys only.

            AttnMask.varlen([0, 2, 4], causal=True)
            x . . .
            x x . .
            . . x .
            . . x x

            AttnMask.varlen([0, 5, 7], causal=True, window=(1, 0), global_tokens=1)
            x . . . . . .
            x x . . . . .
            x x x . . . .
            x . x x . . .
            x . . x x . .
            . . . . . x .
            . . . . . x x

        Args:
            cu_seqlens_q: cumulative lengths, starting at 0 and ending at the total; a document may
                be empty.
            cu_seqlens_k: the same for keys; those of the queries if None.
            causal, window: as in :meth:`dense`, in each document.
            global_tokens: how many first keys of each document all its queries see besides the
                window, as far as ``causal`` lets them; all keys of a document that is shorter.
        Raises:
            MaskError: not one-dimensional integers, not starting at 0, or falling; the two differ
                in their number of documents; or another argument is out of range.
        """
        cu_q = cumulative("cu_seqlens_q", cu_seqlens_q)
        cu_k = cu_q if cu_seqlens_k is None else cumulative("cu_seqlens_k", cu_seqlens_k)
        if len(cu_q) != len(cu_k):
            raise MaskError(
                f"cu_seqlens_q has {len(cu_q) - 1} documents and cu_seqlens_k {len(cu_k) - 1}"
            )
        (left, right), first = window_reach(window), count("global_tokens", global_tokens)
        furthest = 0 if flag("causal", causal) else UNBOUNDED
        right = min(right, furthest)
        q0, q1, k0, k1 = cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]
        corner = k1 - q1
        slices = columns(q0, q1, k0, k1, corner - left, corner + right)
        if first and (left, right) != (UNBOUNDED, furthest):
            slices = _open_first_keys(slices, first, corner + furthest)
        return AttnMask._disjoint(slices, int(cu_q[-1]), int(cu_k[-1]))


def _open_first_keys(slices: Slices, first: int, hi: npt.NDArray[np.int64]) -> Slices:
    """``slices`` with the band replaced by (no bound, hi) on the ``first`` first keys of each."""
    opened, rest = slices.copy(), slices.copy()
    opened[:, K1] = rest[:, K0] = np.minimum(slices[:, K0] + first, slices[:, K1])
    opened[:, LO], opened[:, HI] = -UNBOUNDED, hi
    return np.concatenate([opened, rest])
