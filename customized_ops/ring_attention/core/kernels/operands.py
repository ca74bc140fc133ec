"""What a kernel is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..mask.slices import Slices

T = TypeVar("T")
OutLse = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs that a kernel call attends. One object serves every call of a plan's stage, so what
    a kernel works out from it (calls, block lists, index tensors) is worked out once.

    Attributes:
        slices: int64[n, 6], normalised and disjoint; they count rows of q and k.
        q_len, k_len: tokens of q and k, attended or not.
    """

    slices: Slices
    q_len: int
    k_len: int
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def made(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned the first time that ``key`` was asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class BackwardOperands(NamedTuple):
    """The gradient of out, what the forward was given, and what it returned.

    Packed sequences have no b: see :class:`~.window.library_calls.Packing`.

    Attributes:
        dout, out: [b, i, h, e]. q: [b, i, h, d]. k: [b, j, g, d]. v: [b, j, g, e].
        lse: [b, h, i]. Like out it is final: over all keys of a row, not only over those in k.
        dlse: [b, h, i], the gradient of the final lse, in lse's dtype; None for 0.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None = None

    def part(self, rows: slice, keys: slice) -> BackwardOperands:
        """Some of the rows and some of the keys, as views."""
        dout, q, out = [t[:, rows] for t in (self.dout, self.q, self.out)]
        dlse = None if self.dlse is None else self.dlse[..., rows]
        return BackwardOperands(
            dout, q, self.k[:, keys], self.v[:, keys], out, self.lse[..., rows], dlse
        )
