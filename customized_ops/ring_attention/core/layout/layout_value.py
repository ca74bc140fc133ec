"""A layout as a value: what it holds, how it compares and prints, and how tensors are cut by it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from ..arrays import Ints
from ..mask.intervals import members
from . import layout_tables as tables
from .layout_arguments import LayoutError, shorten, write_ranges

if TYPE_CHECKING:
    import torch

# A shard of up to this many ranges is sliced and joined; one of more is gathered by token.
FEW_RANGES = 32
# Layouts in use, by their spec: ops carry layouts as text, and need not parse it again.
IN_USE: WeakValueDictionary[str, Any] = WeakValueDictionary()


@dataclass(frozen=True, eq=False, repr=False)
class LayoutValue:
    """Token ranges per rank, in the rank's local order; :class:`.Layout` is the class for users.

    Attributes:
        table: int64[n, 3]: rank, start, stop of each range of global tokens, by rank, and in a
            rank's local order; local token n of a rank is the n-th token of its ranges. No range is
            empty or continues the one before it. Over all ranks they cover 0..total-1, each token
            once.
        group_size: number of ranks; some may hold nothing.
        given_spec: short form of :attr:`spec`, where there is one.

    Two layouts are equal when every rank holds the same tokens in the same order.

    Raises:
        LayoutError: the ranges leave a token out or hold one twice; names the first such token.
    """

    table: Ints
    group_size: int
    given_spec: str | None = None

    def __post_init__(self) -> None:
        table = tables.joined(self.table)
        table.setflags(write=False)
        object.__setattr__(self, "table", table)
        tables.check_tiling(self.pieces)
        for name in ("spec", "total"):  # cached now: torch.compile cannot trace how they are made
            getattr(self, name)
        IN_USE.setdefault(self.spec, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a layout that comes from another process."""
        self.__dict__.update(state)
        IN_USE.setdefault(self.spec, self)

    @cached_property
    def _hash(self) -> int:
        return hash((self.group_size, self.table.tobytes()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayoutValue):
            return NotImplemented
        if self is other or self.spec == other.spec:  # quick; one layout may have several texts
            return True
        return self.group_size == other.group_size and np.array_equal(self.table, other.table)

    def __fx_create_arg__(self, tracer: object) -> str:
        """The layout as text, for a graph that becomes Python code."""
        from annotations.codegen.constants import to_text

        return to_text(self)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        """The spec for messages, shortened where it is long."""
        return shorten(self.spec)

    def __repr__(self) -> str:
        return f"Layout({self})"

    @cached_property
    def spec(self) -> str:
        """Text that :meth:`parse` turns back into this layout (see :mod:`.layout_arguments`)."""
        return self.given_spec or write_ranges(self.table, self.group_size)

    @cached_property
    def ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Each rank's global token ranges (start, stop) in local order, for people to read."""
        each = (self._own(rank).tolist() for rank in range(self.group_size))
        return tuple(tuple((start, stop) for start, stop in own) for own in each)

    @cached_property
    def total(self) -> int:
        """Number of tokens over all ranks."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        rank, start, stop = self.table.T
        sizes = np.bincount(rank, weights=stop - start, minlength=self.group_size)
        return tuple(sizes.astype(np.int64).tolist())

    @cached_property
    def pieces(self) -> Ints:
        """int64[n, 4]: rank, start, stop, offset of ``start`` among the rank's own tokens.

        Sorted by start: the pieces tile the sequence.
        """
        pieces = tables.by_start(self.table)
        pieces.setflags(write=False)
        return pieces

    @cached_property
    def pieces_by_holder(self) -> Ints:
        """int64[n]: rank * n + index for each of the n :attr:`pieces`, sorted."""
        count = len(self.pieces)
        return np.sort(self.pieces[:, 0] * count + np.arange(count))

    def places(self, rank: int) -> Ints:
        """int64[m, 3]: start, stop and offset of the rank's :attr:`pieces`, by start."""
        return self.pieces[self.pieces[:, 0] == rank, 1:]

    def _own(self, rank: int) -> Ints:
        """int64[n, 2]: the rank's ranges."""
        if not hasattr(rank, "__index__") or not 0 <= rank < self.group_size:
            raise LayoutError(f"rank must be in 0..{self.group_size - 1}, got {rank!r}")
        first, last = np.searchsorted(self.table[:, 0], [rank, rank + 1])
        return self.table[first:last, 1:]

    def positions(self, rank: int) -> Ints:
        """Global indices of rank's tokens in local order, int64: its position ids for RoPE."""
        return members(*self._own(rank).T)

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """``rank``'s tokens of the whole tensor ``x``, whose dim ``dim`` is the sequence.

        A view where the rank holds one range, else a copy. More than FEW_RANGES ranges are gathered
        by an index that is copied to the device of ``x``. Differentiable.

        Raises:
            LayoutError: ``x`` is not a tensor as long as the layout, or ``rank`` is not one of the
                layout's ranks.
        """
        import torch

        if _length("Layout.shard: x", x, dim) != self.total:
            fits = [f"dim={n}" for n, length in enumerate(x.shape) if length == self.total]
            raise LayoutError(
                f"dim {dim} of {tuple(x.shape)} is not the layout's {self.total} tokens"
                + f"; pass {' or '.join(fits)}" * bool(fits)
            )
        own = self._own(rank)
        if len(own) > FEW_RANGES:
            return x.index_select(dim, torch.from_numpy(self.positions(rank)).to(x.device))
        parts = [x.narrow(dim, start, stop - start) for start, stop in own.tolist()]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole tensor, from every rank's shard in rank order. Differentiable.

        Raises:
            LayoutError: the shards are not tensors of the lengths that the layout gives.
        """
        import torch

        if not hasattr(shards, "__getitem__"):
            raise LayoutError(
                f"Layout.unshard: shards must be a list of {self.group_size} tensors, got "
                f"{reprlib.repr(shards)}"
            )
        given = tuple(_length("Layout.unshard: a shard", shard, dim) for shard in shards)
        if given != self.sizes:
            raise LayoutError(f"shards have {given} tokens, layout {self} gives {self.sizes}")
        if len(self.pieces) > FEW_RANGES:
            held = np.concatenate([self.positions(rank) for rank in range(self.group_size)])
            index = torch.from_numpy(np.argsort(held)).to(shards[0].device)
            return torch.cat(list(shards), dim).index_select(dim, index)
        parts = [
            shards[rank].narrow(dim, offset, stop - start)
            for rank, start, stop, offset in self.pieces.tolist()
        ]
        return torch.cat(parts, dim) if parts else shards[0]


def _length(what: str, x: Any, dim: int) -> int:
    """The length of dim ``dim`` of ``x``; ``what`` names it in errors."""
    if not hasattr(x, "narrow"):
        raise LayoutError(f"{what} must be a tensor, got {reprlib.repr(x)}")
    try:
        length: int = x.shape[dim]
    except (IndexError, TypeError):
        raise LayoutError(
            f"{what} must have a dim {dim} for its tokens (dim= names another), got "
            f"{tuple(x.shape)}"
        ) from None
    return length
