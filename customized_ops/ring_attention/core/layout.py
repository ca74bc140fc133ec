"""Which rank holds which tokens of a sequence, and in which order.

A layout is the same on every rank and is made from arguments alone, so that every rank knows where
every token is without asking anybody.

    contiguous(8, 2)   rank 0: 0 1 2 3    rank 1: 4 5 6 7
    zigzag(8, 2)       rank 0: 0 1 6 7    rank 1: 2 3 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class LayoutError(ValueError):
    """A layout that cannot be, or one that contradicts what it is used with."""


@dataclass(frozen=True)
class Layout:
    """Token ranges per rank, in the rank's local order.

    Attributes:
        ranges: for each rank its global token ranges ``(start, stop)``; local token n is the n-th
            token of their concatenation. Together the ranges cover 0..total-1, each token once.
        spec: short text that :meth:`parse` turns back into this layout. It is how a layout travels
            through a graph, whose ops take only numbers and strings.
    """

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    spec: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __str__(self) -> str:
        return self.spec

    @staticmethod
    def contiguous(total: int, group_size: int) -> Layout:
        """``total`` tokens in order, split as DTensor's ``Shard`` splits: ceil(total / group_size)
        tokens a rank, so the last ranks may hold fewer, or none.

        Raises:
            LayoutError: ``total`` is negative or ``group_size`` is not positive.
        """
        bounds = _chunk_bounds(total, group_size)
        return Layout(
            tuple(_without_empty([pair]) for pair in bounds), f"contiguous:{total}:{group_size}"
        )

    @staticmethod
    def zigzag(total: int, group_size: int) -> Layout:
        """2 * group_size chunks; rank r holds chunk r and its mirror image 2 * group_size - 1 - r.

        Under a causal mask each rank then has the same work, up to what rounding the chunks
        takes when 2 * group_size does not divide ``total``.
        """
        bounds = _chunk_bounds(total, 2 * group_size if group_size > 0 else group_size)
        return Layout(
            tuple(_without_empty([bounds[r], bounds[-1 - r]]) for r in range(group_size)),
            f"zigzag:{total}:{group_size}",
        )

    @staticmethod
    def from_sizes(sizes: Sequence[int]) -> Layout:
        """Tokens in order, ``sizes[r]`` of them on rank r; a size may be 0.

        Raises:
            LayoutError: no sizes, or a negative one.
        """
        if len(sizes) == 0 or any(size != int(size) or size < 0 for size in sizes):
            raise LayoutError(
                f"Layout.from_sizes: sizes must be 0 or more, one a rank, got {sizes}"
            )
        ends = np.cumsum(np.asarray(sizes, dtype=np.int64)).tolist()
        return Layout(
            tuple(
                _without_empty([(end - size, end)]) for size, end in zip(sizes, ends, strict=True)
            ),
            "sizes:" + ",".join(str(int(size)) for size in sizes),
        )

    @staticmethod
    def parse(spec: str) -> Layout:
        """The layout whose :attr:`spec` this is.

        Raises:
            LayoutError: ``spec`` is not one.
        """
        try:
            return _parse(spec)
        except LayoutError:
            raise
        except ValueError:
            raise LayoutError(f"{spec!r} is not the spec of a layout") from None

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @cached_property
    def total(self) -> int:
        """Number of tokens over all ranks."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        return tuple(sum(stop - start for start, stop in own) for own in self.ranges)

    @cached_property
    def pieces(self) -> npt.NDArray[np.int64]:
        """int64[n, 4]: rank, start, stop, offset of ``start`` among the rank's own tokens.

        Sorted by start: the pieces tile the sequence.
        """
        rows = []
        for rank, own in enumerate(self.ranges):
            offset = 0
            for start, stop in own:
                rows.append((rank, start, stop, offset))
                offset += stop - start
        table = np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 4)
        table.setflags(write=False)
        return table

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Global indices of rank's tokens in local order: its position ids for RoPE."""
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in self.ranges[rank]]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """``rank``'s tokens of the whole tensor ``x``, whose dim ``dim`` is the sequence.

        A view where the rank holds one range, else a copy. Differentiable.
        """
        if x.shape[dim] != self.total:
            raise LayoutError(
                f"dim {dim} of {tuple(x.shape)} is not the layout's {self.total} tokens"
            )
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else _cat(parts, dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole tensor, from every rank's shard in rank order. Differentiable.

        Raises:
            LayoutError: the shards are not as long as the layout says.
        """
        lengths = tuple(shard.shape[dim] for shard in shards)
        if lengths != self.sizes:
            raise LayoutError(f"shards have {lengths} tokens, layout {self} gives {self.sizes}")
        parts = [
            shards[rank].narrow(dim, offset, stop - start)
            for rank, start, stop, offset in self.pieces.tolist()
        ]
        return _cat(parts, dim) if parts else shards[0]


def _cat(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    import torch

    return torch.cat(list(parts), dim)


def _chunk_bounds(total: int, chunks: int) -> list[tuple[int, int]]:
    if total < 0 or chunks < 1:
        raise LayoutError(f"cannot lay {total} tokens over {chunks} chunks")
    size = -(-total // chunks)
    return [(min(n * size, total), min((n + 1) * size, total)) for n in range(chunks)]


def _without_empty(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in ranges if start < stop)


@lru_cache(maxsize=1024)
def _parse(spec: str) -> Layout:
    kind, _, rest = spec.partition(":")
    if kind == "sizes":
        return Layout.from_sizes([int(size) for size in rest.split(",")])
    if kind not in ("contiguous", "zigzag"):
        raise LayoutError(f"unknown layout {spec!r}; known: contiguous, zigzag, sizes")
    total, group_size = (int(number) for number in rest.split(":"))
    return (Layout.contiguous if kind == "contiguous" else Layout.zigzag)(total, group_size)
