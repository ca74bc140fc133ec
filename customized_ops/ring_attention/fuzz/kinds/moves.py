"""Cases of the functions that move tokens from one layout to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import Self

from ... import (
    AttnMask,
    Layout,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
)
from . import sequences
from .distributed_case import ALIKE, WHOLE, DistributedCase, Place, cut

OPS: dict[str, Any] = {
    "shuffle": wrap_shuffle_func,
    "unshuffle": wrap_unshuffle_func,
    "shard": wrap_shard_func,
    "unshard": wrap_unshard_func,
    "roll": wrap_roll_func,
    "maybe_shuffle": wrap_maybe_shuffle,
    "maybe_unshuffle": wrap_maybe_unshuffle,
}


@dataclass(frozen=True)
class MoveCase(DistributedCase):
    """A call that puts the tokens it is given, possibly rolled, in another place.

    Attributes:
        op: which of OPS. dim: the dim of tokens. others: the sizes of the other dims.
        shifts: of a roll. cu_seqlens: for the two ops that lay out documents.
    """

    op: str
    length: int
    dim: int = 0
    others: tuple[int, ...] = ()
    shifts: int = 0
    cu_seqlens: tuple[int, ...] = ()

    SIMPLER: ClassVar[tuple[str, ...]] = (
        *("strided", "layout", "dtype", "dim", "others", "shifts", "seed"),
    )
    RESULTS: ClassVar[tuple[str, ...]] = ("y",)

    @property
    def rows(self) -> int:
        return self.length

    @property
    def _shape(self) -> tuple[int, ...]:
        return (*self.others[: self.dim], self.length, *self.others[self.dim :])

    def _layout(self, ranks: int) -> Layout:
        if self.cu_seqlens:
            return Layout.zigzag(self.length, ranks, self.cu_seqlens)
        return sequences.layout_of(self.layout, self.length, ranks)

    def arguments(self) -> dict[str, Tensor]:
        return {"x": self.normal()(*self._shape)}

    def upstream(self) -> dict[str, Tensor]:
        return {"y": self.normal(1)(*self._shape)}

    def places(self, ranks: int) -> dict[str, Place]:
        """Where the call takes tokens from, and where it puts them."""
        plain = cut(Layout.contiguous(self.length, ranks), self.dim)
        there = cut(self._layout(ranks), self.dim)
        x, y = {
            "shuffle": (plain, there),
            "unshuffle": (there, plain),
            "shard": (ALIKE, there),
            "unshard": (there, WHOLE),
            "roll": (there, there),
        }[self.op.removeprefix("maybe_")]
        return {"x": x, "y": y}

    def call_on_rank(
        self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any
    ) -> tuple[Tensor, ...]:
        x, where = given["x"], {"process_group": group}
        if self.cu_seqlens:
            return (OPS[self.op](x, list(self.cu_seqlens), **where),)
        shifts = {"shifts": self.shifts} if self.op == "roll" else {}
        layout = self._layout(ranks)
        return (OPS[self.op](x, layout=layout, dim=self.dim, **shifts, **where),)

    def specification(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """All tokens in order."""
        return (given["x"].roll(self.shifts, self.dim),)

    def fewer(self) -> Iterator[Self]:
        """Cases with a shift of one token, or with fewer tokens or documents."""
        if abs(self.shifts) > 1:
            yield replace(self, shifts=1)
        for tokens in sequences.fewer_tokens(self.length, self.cu_seqlens):
            yield replace(self, **tokens)


def drawn(random: Random, ranks: int) -> MoveCase:
    op = random.choice(list(OPS))
    case = MoveCase(
        op,
        sequences.length(random),
        others=tuple(random.choices([1, 2, 3], k=random.randint(0, 3))),
        shifts=random.randint(-200, 200) if op == "roll" else 0,
        strided=sequences.rarely(random),
        dtype=random.choice(sequences.DTYPES),
        seed=random.randrange(1000),
    )
    if op.startswith("maybe"):  # ranks must hold as many tokens before as after
        lengths = [2 * ranks * random.randint(0, 4) for _ in range(random.randint(1, 5))]
        ends = tuple(np.cumsum([0, 2 * ranks, *lengths]).tolist())
        return replace(case, cu_seqlens=ends, length=ends[-1])
    mask = AttnMask.causal(case.length)
    layout = sequences.layout(random, mask, case.length, ranks)
    return replace(case, layout=layout, dim=random.randint(0, len(case.others)))
