"""Masks from other notations: slices, typed ranges, block matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Ints, columns
from .intervals import runs
from .mask_arguments import MaskError, count, ranges, shown
from .mask_value import MaskValue
from .overlap import require_disjoint
from .row_runs import runs_of, slices_of_runs
from .slices import K1, Q1, UNBOUNDED, Slices

if TYPE_CHECKING:
    from typing import Self

# Bit 0: the diagonal through the bottom right corner bounds from above; bit 1: the one through the
# top left corner bounds from below.
RANGE_TYPES = ("full", "causal", "inv_causal", "bi_causal")


class Conversions(MaskValue):
    """Constructors from other forms of a mask."""

    @classmethod
    def from_slices(cls, rows: Sequence[Sequence[int]] | Slices, q_len: int, k_len: int) -> Self:
        """A mask from any band slices (q0, q1, k0, k1, lo, hi).

            AttnMask.from_slices([(0, 2, 0, 3, 0, 1), (2, 3, 0, 2, -9, 9)], 3, 4)
            x x . .
            . x x .
            x x . .

        Args:
            rows: integers [n, 6]: queries [q0, q1) with keys [k0, k1), lo <= j - i <= hi.
            q_len, k_len: tokens.
        Raises:
            MaskError: not integers, a slice leaves the sequences, or two slices share a pair;
                names them as given.
        """
        return cls(rows, q_len, k_len)

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Sequence[Sequence[int]] | npt.NDArray[np.integer],
        k_ranges: Sequence[Sequence[int]] | npt.NDArray[np.integer],
        types: Sequence[str | int] | npt.NDArray[np.integer],
        q_len: int | None = None,
        k_len: int | None = None,
    ) -> Self:
        """A mask from query ranges, their key ranges and a type for each, as in MagiAttention.

            AttnMask.from_ranges([(0, 3), (3, 5)], [(0, 4), (1, 4)], ["causal", "inv_causal"])
            x x . .
            x x x .
            x x x x
            . x x x
            . . x x

        The diagonal of "causal" ends in the rectangle's bottom right corner, that of "inv_causal"
        starts in its top left one, and "bi_causal" lies between the two: in a square that is the
        diagonal alone, and with more queries than keys it is nothing.

        MagiAttention, 2025, https://github.com/SandAI-org/MagiAttention.

        Args:
            q_ranges, k_ranges: (start, stop) pairs, in tokens. Ranges may overlap, as long as no
                pair is covered twice.
            types: "full", "causal", "inv_causal", "bi_causal", or 0 to 3 in that order.
            q_len, k_len: tokens; where the last range ends if None.
        Raises:
            MaskError: not ranges, unknown types, lists of different lengths, a range that leaves
                the sequence, or a pair covered twice; names what is wrong.
        """
        q_len = None if q_len is None else count("q_len", q_len)
        k_len = None if k_len is None else count("k_len", k_len)
        q, k = ranges("q_ranges", q_ranges, q_len), ranges("k_ranges", k_ranges, k_len)
        kinds = _range_types(types)
        if not len(q) == len(k) == len(kinds):
            raise MaskError(
                f"q_ranges, k_ranges and types must be equally many, got {len(q)}, {len(k)} and "
                f"{len(kinds)}"
            )
        q_len = count("q_len", q[:, 1].max(initial=0)) if q_len is None else q_len
        k_len = count("k_len", k[:, 1].max(initial=0)) if k_len is None else k_len
        lo = np.where(kinds & 2, k[:, 0] - q[:, 0], -UNBOUNDED)
        hi = np.where(kinds & 1, k[:, 1] - q[:, 1], UNBOUNDED)
        slices = np.column_stack([q, k, lo, hi])

        def name(n: int) -> str:
            q_range, k_range = tuple(q[n].tolist()), tuple(k[n].tolist())
            return f"range {n} ({RANGE_TYPES[kinds[n]]}, q {q_range} x k {k_range})"

        require_disjoint(slices, name)
        return cls._disjoint(slices, q_len, k_len)

    @classmethod
    def from_dense(cls, dense: npt.NDArray[np.bool_] | Sequence[Sequence[bool]]) -> Self:
        """A mask from all its pairs, the inverse of ``to_dense``, in few slices (:mod:`.row_runs`).

            AttnMask.from_dense([[True, False, False], [True, True, True]])
            x . .
            x x x

        Args:
            dense: bool[q_len, k_len].
        Raises:
            MaskError: not bool or not two-dimensional.
        """
        pairs = _bool_matrix("dense", dense)
        return cls._disjoint(slices_of_runs(runs_of(pairs)), *pairs.shape)

    @classmethod
    def from_block_mask(
        cls,
        block_mask: npt.NDArray[np.bool_] | Sequence[Sequence[bool]],
        block: int | tuple[int, int],
        q_len: int | None = None,
        k_len: int | None = None,
    ) -> Self:
        """A block-sparse mask: one full slice per rectangle of set blocks.

            AttnMask.from_block_mask([[True, False], [True, True]], block=2, k_len=3)
            x x .
            x x .
            x x x
            x x x

        A run of set blocks is one slice, and runs that repeat in the block row below join it.

        Args:
            block_mask: bool[block rows, block columns].
            block: tokens in a block, or (query tokens, key tokens).
            q_len, k_len: tokens; whole blocks if None. The last block may be short, not empty.
        Raises:
            MaskError: not bool or not two-dimensional, ``block`` below 1, or lengths that need
                another number of blocks.
        """
        blocks = _bool_matrix("block_mask", block_mask)
        sizes = block if isinstance(block, (tuple, list)) else (block, block)
        if len(sizes) != 2:
            raise MaskError(f"block must be an integer or two, got {shown(block)}")
        q_block, k_block = (count("block", size, least=1) for size in sizes)
        q_len = _block_length("q_len", q_len, blocks.shape[0], q_block)
        k_len = _block_length("k_len", k_len, blocks.shape[1], k_block)
        slices = _set_rectangles(blocks) * np.array([q_block, q_block, k_block, k_block, 1, 1])
        slices[:, Q1] = np.minimum(slices[:, Q1], q_len)
        slices[:, K1] = np.minimum(slices[:, K1], k_len)
        return cls._disjoint(slices, q_len, k_len)


def _range_types(types: Sequence[str | int] | npt.NDArray[np.integer]) -> Ints:
    """Indices into RANGE_TYPES."""
    known: dict[object, int] = {name: n for n, name in enumerate(RANGE_TYPES)}
    known |= {n: n for n in known.values()}
    if not isinstance(types, (list, tuple, np.ndarray)):
        raise MaskError(f"types must be a list with a type for each range, got {shown(types)}")
    kinds = []
    for n, kind in enumerate(types):
        if not isinstance(kind, (str, int, np.integer)) or kind not in known:
            names = ", ".join(f"{name!r} ({index})" for index, name in enumerate(RANGE_TYPES))
            raise MaskError(f"types[{n}] = {shown(kind)} is not known; known: {names}")
        kinds.append(known[kind])
    return np.array(kinds, dtype=np.int64)


def _bool_matrix(name: str, given: object) -> npt.NDArray[np.bool_]:
    try:
        matrix = np.asarray(given)
    except ValueError:  # ragged
        raise MaskError(f"{name} must be a matrix, got {shown(given)}") from None
    if matrix.dtype != np.bool_ or matrix.ndim != 2:
        sizes = "block rows, block columns" if name == "block_mask" else "queries, keys"
        raise MaskError(f"{name} must be bool[{sizes}], got {matrix.dtype} of shape {matrix.shape}")
    return matrix


def _block_length(name: str, length: int | None, blocks: int, block: int) -> int:
    """Tokens in ``blocks`` blocks, the last of which may be short."""
    if length is None:
        return blocks * block
    tokens = count(name, length)
    if -(-tokens // block) != blocks:
        raise MaskError(
            f"{name} = {tokens} takes {-(-tokens // block)} blocks of {block}, but block_mask has "
            f"{blocks}"
        )
    return tokens


def _set_rectangles(blocks: npt.NDArray[np.bool_]) -> Slices:
    """Disjoint rectangles of set blocks, int64[n, 6] in blocks, top to bottom and left to right."""
    row, start, stop = runs_of(blocks).T
    order = np.lexsort((row, stop, start))
    row, start, stop = row[order], start[order], stop[order]
    # With equal runs side by side, a run tops a rectangle unless the row above has it too.
    apart = (np.diff(row) != 1) | (np.diff(start) != 0) | (np.diff(stop) != 0)
    top, bottom = runs(apart, len(row))
    wide = np.full_like(top, UNBOUNDED)
    slices = columns(row[top], row[bottom] + 1, start[top], stop[top], -wide, wide)
    return slices[np.lexsort((start[top], row[top]))]
