"""Tokens of tensors that leave for peers, or arrive from them.

Tokens that are one range of a tensor are a view of it. Scattered tokens are moved by their indices
straight to their places: several tensors at once, into another dtype if need be, in one pass over
memory (``merge.rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..merge import merge_
from ..merge.rows import add_rows, copy_rows
from ..plan.exchanges.peer_tokens import Where
from ..tape import allocate


class Dims(NamedTuple):
    """Which dims of a tensor are its tokens and its heads."""

    tokens: int
    heads: int
    # Heads (start, stop) of each rank of a team: peer p has share p % len(shares). Empty: all have
    # all heads.
    shares: tuple[tuple[int, int], ...] = ()

    @property
    def of_share(self) -> Dims:
        """The dims of a tensor that holds one share: all of its heads are meant."""
        return self._replace(shares=()) if self.shares else self

    def share_alone(self, rank: int) -> Dims:
        """The dims where all ranks have the share of ``rank``."""
        if not self.shares:
            return self
        return self._replace(shares=(self.shares[rank % len(self.shares)],))

    def shape(self, tensor: Tensor, tokens: int, rank: int) -> list[int]:
        """The shape of ``tensor`` with this number of tokens, and only the heads of ``rank``."""
        shape = list(tensor.shape)
        shape[self.tokens] = tokens
        if self.shares:
            start, stop = self.shares[rank % len(self.shares)]
            shape[self.heads] = stop - start
        return shape

    def share(self, tensor: Tensor, rank: int) -> Tensor:
        """The heads of ``rank``, a view."""
        if not self.shares:
            return tensor
        start, stop = self.shares[rank % len(self.shares)]
        return tensor.narrow(self.heads, start, stop - start)


ROWS, STATS = Dims(tokens=1, heads=2), Dims(tokens=2, heads=1)  # [b, l, h, d] and [b, h, l]


class TokenBlock(NamedTuple):
    """The same tokens of several tensors."""

    tensors: Sequence[Tensor]
    tokens: Sequence[int]  # which dim of each tensor its tokens are
    rows: Tensor | None = None  # int64[n], which tokens; None: all


Put = Callable[[TokenBlock, Sequence[Tensor]], None]
Shapes = tuple[tuple[int, ...], ...]


def place(places: TokenBlock, parts: Sequence[Tensor]) -> None:
    """Write arrived parts over their places."""
    copy_rows(parts, places.tensors, places.tokens, to_rows=places.rows)


def add(places: TokenBlock, parts: Sequence[Tensor]) -> None:
    """Add arrived parts to their places."""
    add_rows(parts, places.tensors, places.tokens, places.rows)


def merge(places: TokenBlock, parts: Sequence[Tensor]) -> None:
    """Merge an arrived (out, lse) into what is there."""
    (out, lse), (part_out, part_lse) = places.tensors, parts
    merge_(out, lse, part_out, part_lse, places.rows)


def copy(source: TokenBlock, target: TokenBlock) -> None:
    """Write the tokens of one block over those of another, in its dtypes."""
    copy_rows(source.tensors, target.tensors, target.tokens, source.rows, target.rows)


@dataclass(slots=True)
class TransferSide:
    """Tensors whose tokens leave, or arrive."""

    tensors: Sequence[Tensor]
    dims: Sequence[Dims]  # of each tensor; a peer has its share of the heads
    peers: Mapping[int, Where]  # where the tokens of each peer are

    def shape(self, n: int, peer: int) -> list[int]:
        """The shape of the peer's part of tensor ``n``."""
        return self.dims[n].shape(self.tensors[n], self.peers[peer].count, peer)

    def shapes(self, peer: int, count: int) -> Shapes:
        """Those of ``count`` tokens of all tensors, with the peer's share of the heads."""
        both = zip(self.tensors, self.dims, strict=True)
        return tuple([tuple(dim.shape(t, count, peer)) for t, dim in both])

    def of(self, peer: int) -> TokenBlock:
        """The peer's part, in place."""
        return self.block(self.peers[peer], peer)

    def block(self, where: Where, peer: int) -> TokenBlock:
        """These tokens, with the peer's share of the heads, in place."""
        parts, tokens = self.of_share(peer), [dim.tokens for dim in self.dims]
        if where.ranges is not None:
            return TokenBlock(parts, tokens, where.table.on(parts[0].device))
        start, count, both = where.start, where.count, zip(parts, tokens, strict=True)
        return TokenBlock(
            [t if t.shape[dim] == count else t.narrow(dim, start, count) for t, dim in both], tokens
        )

    def of_share(self, peer: int) -> list[Tensor]:
        """The tensors with the peer's share of the heads, views."""
        return [dim.share(t, peer) for t, dim in zip(self.tensors, self.dims, strict=True)]

    def take(self, peer: int) -> Sequence[Tensor]:
        """The peer's part. Where its tokens are one range, these are views, or the tensors
        themselves; else they are new tensors."""
        block = self.of(peer)
        if block.rows is None:
            return block.tensors
        shapes = self.shapes(peer, self.peers[peer].count)
        both = zip(self.tensors, shapes, strict=True)
        parts = [allocate(t.new_empty, shape) for t, shape in both]
        copy(block, TokenBlock(parts, block.tokens))
        return parts


class Buffers:
    """Where fetched tokens go; calling it returns them, and allocates them the first time.

    Args:
        wanted: tensors like them, with the rank's share of the heads.
        tokens: how many they have.
        into: returns those of another fetch that this one fills, too.
    """

    def __init__(
        self,
        wanted: TransferSide,
        tokens: int,
        rank: int,
        into: Callable[[], TransferSide] | None,
    ) -> None:
        self._wanted, self._tokens, self._rank, self._into = wanted, tokens, rank, into
        self._made: TransferSide | None = None

    def __call__(self) -> TransferSide:
        if self._made is None:
            tensors, dims, peers = self._wanted.tensors, self._wanted.dims, self._wanted.peers
            if self._into is not None:
                buffers = self._into().tensors
            else:
                shapes = self._wanted.shapes(self._rank, self._tokens)
                buffers = [allocate(t.new_empty, s) for t, s in zip(tensors, shapes, strict=True)]
            self._made = TransferSide(buffers, [dim.of_share for dim in dims], peers)
        return self._made
