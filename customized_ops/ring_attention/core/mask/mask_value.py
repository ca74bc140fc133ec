"""A mask as a value: what it holds, how it compares and prints, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from . import slices as arithmetic
from .mask_arguments import MaskError, count, integers, one_range, shown
from .overlap import require_disjoint
from .slices import HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Slices, areas, clip, normalise, to_dense

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, eq=False, repr=False, init=False)
class MaskValue:
    """The slices and lengths of a mask; the class in use is :class:`.attn_mask.AttnMask`.

    Attributes:
        key: value identity, for caches; bytes cache their hash.
    """

    slices: Slices
    q_len: int
    k_len: int
    key: tuple[int, int, bytes]

    def __init__(self, slices: Sequence[Sequence[int]] | Slices, q_len: int, k_len: int) -> None:
        """As :meth:`.attn_mask.AttnMask.from_slices`: checks and copies what it is given."""
        q_len, k_len = count("q_len", q_len), count("k_len", k_len)
        given = integers("slices", slices, width=6)
        require_inside(given, q_len, k_len)
        bounded = given.copy()
        bounded[:, [LO, HI]] = np.clip(given[:, [LO, HI]], -UNBOUNDED, UNBOUNDED)
        require_disjoint(bounded, lambda n: f"slices[{n}] = {tuple(given[n].tolist())}")
        self._hold(normalise(bounded).tobytes(), q_len, k_len)

    def _hold(self, data: bytes, q_len: int, k_len: int) -> None:
        # Bytes never change, so no array over them can be made writable.
        slices = np.frombuffer(data, dtype=np.int64).reshape(-1, 6)
        vars(self).update(slices=slices, q_len=q_len, k_len=k_len, key=(q_len, k_len, data))

    @classmethod
    def _from_bytes(cls, data: bytes, q_len: int, k_len: int) -> Self:
        """A mask from the bytes of another mask's slices, or of equally sound ones, unchecked."""
        mask = object.__new__(cls)
        mask._hold(data, q_len, k_len)
        return mask

    @classmethod
    def _disjoint(cls, slices: Slices, q_len: int, k_len: int) -> Self:
        """A mask of slices that are disjoint by construction: nothing is checked."""
        return cls._from_bytes(normalise(slices).tobytes(), q_len, k_len)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskValue) and self.key == other.key

    def __fx_create_arg__(self, tracer: object) -> str:
        """The mask as text, for a graph that becomes Python code."""
        from annotations.codegen.constants import to_text

        return to_text(self)

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Callable[..., MaskValue], tuple[bytes, int, int]]:
        # An array that is pickled or copied comes back writable; bytes do not.
        return type(self)._from_bytes, (self.key[2], self.q_len, self.k_len)

    def __repr__(self) -> str:
        pairs = self.q_len * self.k_len
        return (
            f"{type(self).__name__}(q_len={self.q_len}, k_len={self.k_len}, "
            f"slices={len(self.slices)}, area={self.area}, "
            f"density={self.area / pairs if pairs else 0:.3%})"
        )

    @property
    def area(self) -> int:
        """Number of attended pairs; forward work is 4 * area * heads * head_dim FLOP."""
        return int(areas(self.slices).sum())

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """bool[q_len, k_len]; for tests and small pictures."""
        return to_dense(self.slices, self.q_len, self.k_len)

    def picture(self, width: int = 32) -> str:
        """The mask in characters, one row of text per query row.

        A sequence longer than ``width`` is drawn in square cells of several tokens: x where all
        pairs of a cell attend, . where none does, + where some do.

            AttnMask.causal(1000).picture(width=4)
            + . . .
            x + . .
            x x + .
            x x x +

        Args:
            width: most cells in a row and in a column.
        Raises:
            MaskError: ``width`` is not a positive integer.
        """
        cells = count("width", width, least=1)
        tokens = max(1, -(-max(self.q_len, self.k_len) // cells))
        lines = []
        for q0 in range(0, self.q_len, tokens):
            q1 = min(q0 + tokens, self.q_len)
            row = clip(self.slices, q0, q1, 0, self.k_len)
            signs = []
            for k0 in range(0, self.k_len, tokens):
                k1 = min(k0 + tokens, self.k_len)
                attended = int(areas(clip(row, q0, q1, k0, k1)).sum())
                all_of_it = attended == (q1 - q0) * (k1 - k0)
                signs.append("x" if all_of_it else "+" if attended else ".")
            lines.append(" ".join(signs))
        return "\n".join(lines)

    def union(self, *others: MaskValue) -> Self:
        """The pairs of this mask and of ``others``, which must be disjoint.

            AttnMask.causal(3).union(AttnMask.from_slices([(0, 1, 2, 3, 2, 2)], 3, 3))
            x . x
            x x .
            x x x

        Args:
            others: masks of the same lengths.
        Raises:
            MaskError: lengths differ, or two masks share a pair; names both slices and masks.
        """
        for n, other in enumerate(others):
            if not isinstance(other, MaskValue):
                raise MaskError(f"others[{n}] must be a mask, got {shown(other)}")
            if (other.q_len, other.k_len) != (self.q_len, self.k_len):
                raise MaskError(
                    f"others[{n}] has {other.q_len} queries x {other.k_len} keys and this mask "
                    f"{self.q_len} x {self.k_len}; shift() can give it other lengths"
                )
        masks = {"this mask": self} | {f"others[{n}]": other for n, other in enumerate(others)}
        slices = np.concatenate([mask.slices for mask in masks.values()])
        owner = np.repeat(list(masks), [len(mask.slices) for mask in masks.values()])
        require_disjoint(slices, lambda n: f"slice {tuple(slices[n].tolist())} of {owner[n]}")
        return self._disjoint(slices, self.q_len, self.k_len)

    def shift(
        self, q_by: int, k_by: int, q_len: int | None = None, k_len: int | None = None
    ) -> Self:
        """The same pairs elsewhere: query i becomes i + ``q_by``, key j becomes j + ``k_by``.

            AttnMask.causal(2).shift(1, 2, q_len=4, k_len=4)
            . . . .
            . . x .
            . . x x
            . . . .

        Args:
            q_by, k_by: tokens, may be negative.
            q_len, k_len: lengths of the new mask; this mask's if None.
        Raises:
            MaskError: not integers, or a pair would leave the new mask; names its slice.
        """
        moves = count("q_by", q_by, least=-self.q_len), count("k_by", k_by, least=-self.k_len)
        q_len = self.q_len if q_len is None else count("q_len", q_len)
        k_len = self.k_len if k_len is None else count("k_len", k_len)
        moved = arithmetic.shift(self.slices, *moves)
        require_inside(moved, q_len, k_len)
        return self._disjoint(moved, q_len, k_len)

    def restrict(
        self, q_range: tuple[int, int] | None = None, k_range: tuple[int, int] | None = None
    ) -> Self:
        """Only the pairs with the query in ``q_range`` and the key in ``k_range``; lengths stay.

            AttnMask.causal(4).restrict((1, 4), (0, 2))
            . . . .
            x x . .
            x x . .
            x x . .

        Args:
            q_range, k_range: (start, stop) in tokens; all of them if None.
        Raises:
            MaskError: not a range, or one that leaves the sequence.
        """
        q0, q1 = one_range("q_range", q_range, self.q_len)
        k0, k1 = one_range("k_range", k_range, self.k_len)
        return self._disjoint(clip(self.slices, q0, q1, k0, k1), self.q_len, self.k_len)


def require_inside(slices: Slices, q_len: int, k_len: int) -> None:
    """Raise a MaskError that names the first slice that is not a range of the sequences."""
    q0, q1, k0, k1 = slices[:, Q0], slices[:, Q1], slices[:, K0], slices[:, K1]
    inside = (q0 >= 0) & (q0 <= q1) & (q1 <= q_len) & (k0 >= 0) & (k0 <= k1) & (k1 <= k_len)
    if not inside.all():
        n = int(inside.argmin())
        row = tuple(slices[n].tolist())
        raise MaskError(f"slices[{n}] = {row} leaves the mask of {q_len} queries x {k_len} keys")
