"""Attention masks: disjoint lists of band slices (see :mod:`.slices`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .slices import (
    HI,
    K0,
    K1,
    LO,
    Q0,
    Q1,
    UNBOUNDED,
    Slices,
    areas,
    as_slices,
    normalise,
    to_dense,
)


class MaskError(ValueError):
    """A mask that cannot be: slices out of range or covering a pair twice."""


def first_overlap(slices: Slices) -> tuple[int, int] | None:
    """Indices of two slices that share a pair, or None."""
    for a in range(len(slices) - 1):
        both = slices[a + 1 :].copy()
        for low in (Q0, K0, LO):
            both[:, low] = np.maximum(both[:, low], slices[a, low])
        for high in (Q1, K1, HI):
            both[:, high] = np.minimum(both[:, high], slices[a, high])
        q0, q1, k0, k1, lo, hi = both.T
        k1, k0 = np.minimum(k1, q1 + hi), np.maximum(k0, q0 + lo)
        hit = (k0 < k1) & (q0 < q1) & (lo <= hi)
        if hit.any():
            return a, a + 1 + int(hit.argmax())
    return None


def _cumulative(name: str, values: object) -> npt.NDArray[np.int64]:
    lengths = np.asarray(values, dtype=np.int64)
    if lengths.ndim != 1 or len(lengths) == 0 or lengths[0] != 0 or (np.diff(lengths) < 0).any():
        raise MaskError(f"{name} must be cumulative lengths [0, ...] that never fall, got {values}")
    return lengths


def _band(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """(lo, hi) around the aligned diagonal, from flash-attn's arguments (-1 is unbounded)."""
    left, right = window
    if causal:
        right = 0
    return (-left if left >= 0 else -UNBOUNDED), (right if right >= 0 else UNBOUNDED)


@dataclass(frozen=True, eq=False)
class AttnMask:
    """Which (query, key) pairs attend, over whole sequences.

    Attributes:
        slices: normalised, disjoint int64[n, 6].
        q_len, k_len: tokens in the query and the key sequence.

    Two masks are equal when their lengths and slices are.
    """

    slices: Slices
    q_len: int
    k_len: int

    def __post_init__(self) -> None:
        self.slices.setflags(write=False)

    @property
    def key(self) -> tuple[int, int, bytes]:
        """Value identity, for caches."""
        return self.q_len, self.k_len, self.slices.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnMask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def area(self) -> int:
        """Number of attended pairs; forward work is 4 * area * heads * head_dim FLOP."""
        return int(areas(self.slices).sum())

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """bool[q_len, k_len]; for tests and small pictures."""
        return to_dense(self.slices, self.q_len, self.k_len)

    @staticmethod
    def from_slices(rows: Sequence[Sequence[int]] | Slices, q_len: int, k_len: int) -> AttnMask:
        """A mask from any slices.

        Raises:
            MaskError: a slice leaves the sequences, or two slices share a pair; names them.
        """
        slices = as_slices(rows)
        for row in slices.tolist():
            q0, q1, k0, k1 = row[:4]
            if not (0 <= q0 <= q1 <= q_len and 0 <= k0 <= k1 <= k_len):
                raise MaskError(
                    f"slice {tuple(row)} leaves the mask of {q_len} queries x {k_len} keys"
                )
        slices = normalise(slices)
        twice = first_overlap(slices)
        if twice is not None:
            a, b = (tuple(slices[x].tolist()) for x in twice)
            raise MaskError(f"slices {a} and {b} cover the same pairs; a mask is a disjoint list")
        return AttnMask(slices, q_len, k_len)

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

            causal        window (1, 1)    causal, window (2, -1)
            x . . .       x x . .          x . . .
            x x . .       x x x .          x x . .
            x x x .       . x x x          x x x .
            x x x x       . . x x          . x x x
        """
        k_len = q_len if k_len is None else k_len
        return AttnMask.varlen([0, q_len], [0, k_len], causal=causal, window=window)

    @staticmethod
    def varlen(
        cu_seqlens_q: Sequence[int] | npt.NDArray[np.integer],
        cu_seqlens_k: Sequence[int] | npt.NDArray[np.integer] | None = None,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
    ) -> AttnMask:
        """Packed documents: document n's queries see document n's keys only.

        ``cu_seqlens`` are cumulative lengths, starting at 0 and ending at the total; a document may
        be empty. Causal and window are as in :meth:`dense`, in each document.

            causal, cu_seqlens = [0, 2, 4]
            x . . .
            x x . .
            . . x .
            . . x x

        Raises:
            MaskError: not one-dimensional, not starting at 0, or falling; or the two differ in
                their number of documents.
        """
        cu_q = _cumulative("cu_seqlens_q", cu_seqlens_q)
        cu_k = cu_q if cu_seqlens_k is None else _cumulative("cu_seqlens_k", cu_seqlens_k)
        if len(cu_q) != len(cu_k):
            raise MaskError(
                f"cu_seqlens_q has {len(cu_q) - 1} documents and cu_seqlens_k {len(cu_k) - 1}"
            )
        lo, hi = _band(causal, window)
        q0, q1, k0, k1 = cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]
        corner = k1 - q1
        slices = np.stack([q0, q1, k0, k1, corner + lo, corner + hi], axis=1)
        return AttnMask(normalise(slices), int(cu_q[-1]), int(cu_k[-1]))
