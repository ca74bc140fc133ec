"""Masks in MagiAttention's terms: ranges of queries, their ranges of keys, a type for each pair.

FULL          CAUSAL        INVCAUSAL     BICAUSAL      queries 3, keys 4
x x x x       x x . .       x x x x       x x . .
x x x x       x x x .       . x x x       . x x .
x x x x       x x x x       . . x x       . . x x
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.mask import AttnMask, MaskError
from ...core.mask.conversions import RANGE_TYPES
from ...op.arguments import ArgumentError
from ...op.tokens.lengths import CuSeqlens, as_tensor, on_host


class AttnMaskType(Enum):
    """Which pairs of a range attend."""

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"

    @classmethod
    def from_int_type(cls, int_type: int) -> AttnMaskType:
        """0 full, 1 causal, 2 inverse causal, 3 both."""
        return cls(RANGE_TYPES[int_type])

    def to_int_type(self) -> int:
        """The inverse of :meth:`from_int_type`."""
        return RANGE_TYPES.index(self.value)


class AttnRange(NamedTuple):
    """Tokens start .. end - 1."""

    start: int
    end: int

    @classmethod
    def from_range(cls, attn_range: Sequence[int]) -> AttnRange:
        """From any pair."""
        start, end = attn_range
        return cls(start, end)

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    def to_naive_range(self) -> tuple[int, int]:
        """A plain tuple."""
        return self.start, self.end


class AttnRanges(list[AttnRange]):
    """A list of ranges."""

    @classmethod
    def from_ranges(cls, ranges: Iterable[Sequence[int]]) -> AttnRanges:
        """From any pairs (start, end)."""
        return cls(AttnRange.from_range(each) for each in ranges)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int], seq_len: int) -> AttnRanges:
        """A range for each document.

        Raises:
            ArgumentError: the last document does not end at ``seq_len``.
        """
        if cu_seqlens[-1] != seq_len:
            raise ArgumentError(
                f"AttnRanges.from_cu_seqlens: cu_seqlens ends at {cu_seqlens[-1]}, seq_len is "
                f"{seq_len}"
            )
        return cls.from_ranges(itertools.pairwise(cu_seqlens))

    def to_naive_ranges(self) -> list[tuple[int, int]]:
        """Plain tuples."""
        return [each.to_naive_range() for each in self]

    def to_tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """int32[n, 2]."""
        return torch.tensor(self.to_naive_ranges(), dtype=torch.int32, device=device).view(-1, 2)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self)

    @property
    def start(self) -> int:
        """The first token."""
        return min(each.start for each in self)

    @property
    def end(self) -> int:
        """One past the last token."""
        return max(each.end for each in self)

    @property
    def total_seqlen(self) -> int:
        """Number of tokens in all ranges."""
        return sum(each.seqlen for each in self)


GeneralAttnMaskType = str | AttnMaskType | Sequence[str | AttnMaskType | int]


def mask_of_ranges(
    title: str, q_ranges: Any, k_ranges: Any, types: GeneralAttnMaskType, q_len: int, k_len: int
) -> AttnMask:
    """The mask of typed ranges. Ranges are AttnRanges (including MagiAttention's own) or pairs
    (start, end); types are one for all or one for each, as AttnMaskType or by name."""
    q, k = (
        each.to_naive_ranges() if hasattr(each, "to_naive_ranges") else each
        for each in (q_ranges, k_ranges)
    )
    each = [types] * len(q) if isinstance(types, str | Enum) else types
    names = [kind.value if isinstance(kind, Enum) else kind for kind in each]
    try:
        return AttnMask.from_ranges(q, k, names, q_len, k_len)
    except MaskError as error:
        raise MaskError(f"{title}: {error}") from None


def mask_of_documents(
    title: str,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> AttnMask:
    """The mask of packed documents; windows align to the bottom right corner, as in flash-attn."""
    if causal and tuple(window_size) != (-1, -1):
        raise ArgumentError(
            f"{title}: causal=True with window_size={window_size}; a causal window is (left, 0)"
        )
    lengths = [
        on_host(as_tensor(title, name, given))
        for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    ]
    try:
        # Beside a window, rows attend to first keys only up to where the window ends.
        if global_window_size and window_size[1] > 0:
            raise NotImplementedError(
                f"{title}: global_window_size with a window to the right, {window_size}"
            )
        closed = causal or window_size[1] == 0
        window = (window_size[0], -1) if closed else window_size
        return AttnMask.varlen(
            *lengths, causal=closed, window=window, global_tokens=global_window_size
        )
    except MaskError as error:
        raise MaskError(f"{title}: {error}") from None


def ranges_of_mask(mask: AttnMask) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """Any mask as typed ranges, up to three for each of its slices."""
    q_ranges, k_ranges, types = AttnRanges(), AttnRanges(), []
    for q0, q1, k0, k1, lo, hi in mask.slices.tolist():
        # Rows before `closed` end at the upper diagonal, rows from `opened` on start at the lower
        closed, opened = np.clip([k1 - 1 - hi, k0 - lo + 1], q0, q1).tolist()
        bounds = [q0, *sorted((closed, opened)), q1]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                above, below = stop <= closed, start >= opened
                q_ranges.append(AttnRange(start, stop))
                k_ranges.append(AttnRange(start + lo if below else k0, stop + hi if above else k1))
                types.append(AttnMaskType.from_int_type(above + 2 * below))
    return q_ranges, k_ranges, types


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens to append so that all ranks get equally many chunks, and all chunks are whole."""
    return -total_seqlen_q % (cp_size * chunk_size)


def squash_batch_dim(x: Tensor) -> Tensor:
    """``b l * -> (b l) *``"""
    return x.flatten(0, 1)


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """cu_seqlens of q and of k, int32[batch_size + 1], for sequences of equal length.

    Args:
        device: None for CUDA if it is available.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return starts, starts


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """Typed ranges of one document's window; the last query sees the last key."""
    (q0, q1), (k0, k1) = q_range, k_range
    one = AttnMask.dense(q1 - q0, k1 - k0, window=window_size)
    return ranges_of_mask(one.shift(q0, k0, q1, k1))


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """Typed ranges of packed documents, and the numbers of queries and keys.

    Args:
        global_window_size: how many first keys of each document all its queries see, in addition
            to a window.
    """
    title = "infer_attn_mask_from_cu_seqlens"
    given = (cu_seqlens_q, cu_seqlens_k, causal, window_size, global_window_size)
    mask = mask_of_documents(title, *given)
    return *ranges_of_mask(mask), mask.q_len, mask.k_len
