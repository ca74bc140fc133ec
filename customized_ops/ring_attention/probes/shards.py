"""Which rank has which tokens, as ranks report them, and which tokens are worth changing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.arrays import Ints
from .model_run import PADDING, Floats

MOST_PLACES = 16


@dataclass(frozen=True, eq=False)
class Shards:
    """Tokens of each rank.

    Attributes:
        said: for each rank, the positions that it reports for its output; -1 for padding.
            Reports may be wrong, which :meth:`held` shows.
        total: tokens of the whole sequence.
    """

    said: Sequence[Ints]
    total: int

    @cached_property
    def replicated(self) -> bool:
        """Whether every rank has all tokens in order."""
        whole = np.arange(self.total)
        return all(np.array_equal(each, whole) for each in self.said)

    @property
    def positions(self) -> Sequence[Ints]:
        """Each rank's tokens, without padding; if every rank has all, only those of the first."""
        ranks = self.said[:1] if self.replicated else self.said
        return [each[each != PADDING] for each in ranks]

    def held(self) -> Ints:
        """How many times each token is held, over all ranks."""
        inside = [each[(each >= 0) & (each < self.total)] for each in self.positions]
        return np.bincount(np.concatenate(inside), minlength=self.total)

    def holder(self) -> Ints:
        """The rank of each token."""
        ranks = np.full(self.total, -1)
        for rank, positions in enumerate(self.positions):
            ranks[positions] = rank
        return ranks

    def borders(self) -> list[int]:
        """Tokens whose rank differs from that of the token before."""
        return [int(n) + 1 for n in np.flatnonzero(np.diff(self.holder()))]

    def whole(self, parts: Sequence[Floats], size: tuple[int, int]) -> Floats:
        """Values of all tokens [b, l] from those of each rank's tokens; if every rank has all
        tokens, the largest."""
        found = np.zeros(size)
        for said, part in zip(self.said, parts, strict=True):
            own = said != PADDING
            at = found[:, said[own]]
            found[:, said[own]] = np.maximum(at, part[:, own])
        return found


def telling_places(shards: Shards, documents: Sequence[int] | None) -> list[int]:
    """The first and the last token, and those on either side of a border of shards or documents; if
    there are many, an evenly spaced selection."""
    ends = shards.borders() + [n for n in documents or () if 0 < n < shards.total]
    found = sorted({0, shards.total - 1, *ends, *(end - 1 for end in ends)})
    kept = np.linspace(0, len(found) - 1, min(len(found), MOST_PLACES)).round().astype(int)
    return [found[n] for n in kept]
