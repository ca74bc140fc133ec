"""Which rows attend which keys in a kernel call, and what kernels have made of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..mask.slices import Slices

T = TypeVar("T")


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
