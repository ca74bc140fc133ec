"""Tokens of tensors that leave for peers, or arrive from them.

Tokens that are one range of a tensor are a view of it. Scattered tokens are moved by their indices
straight to their places: several tensors at once, into another dtype if need be, in one pass over
memory (``merge.rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..merge import merge_
from ..merge.rows import add_rows, copy_rows
from ..plan.exchanges.exchange import Where

SMALL_BYTES = 16 << 20  # up to which parts of a message share a buffer
ALIGNED_BYTES = 16  # kernels load as many at a time


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

    def shapes(self, peer: int) -> list[list[int]]:
        """Those of all tensors."""
        return [self.shape(n, peer) for n in range(len(self.tensors))]

    def of(self, peer: int) -> TokenBlock:
        """The peer's part, in place."""
        where, tokens = self.peers[peer], [dim.tokens for dim in self.dims]
        parts = [dim.share(t, peer) for t, dim in zip(self.tensors, self.dims, strict=True)]
        if where.indices is not None:
            return TokenBlock(parts, tokens, where.table.on(parts[0].device))
        start, count, both = where.start, where.count, zip(parts, tokens, strict=True)
        return TokenBlock(
            [t if t.shape[dim] == count else t.narrow(dim, start, count) for t, dim in both], tokens
        )

    def take(self, peer: int) -> Sequence[Tensor]:
        """The peer's part. Where its tokens are one range, these are views, or the tensors
        themselves; else they are new tensors."""
        block = self.of(peer)
        if block.rows is None:
            return block.tensors
        parts = [
            t.new_empty(shape) for t, shape in zip(self.tensors, self.shapes(peer), strict=True)
        ]
        copy(block, TokenBlock(parts, block.tokens))
        return parts

    def messages(self, wires: Sequence[torch.dtype], but: int) -> dict[int, list[Tensor]]:
        """All parts but one peer's, in :func:`buffers` of the dtypes ``wires``. A part that is one
        block of memory and has a buffer to itself is not copied; peers that are sent the same
        tokens and heads share buffers."""
        made: dict[tuple[Where, tuple[int, ...]], list[Tensor]] = {}
        found = {}
        for peer, where in self.peers.items():
            if peer == but:
                continue
            key = where, tuple(peer % len(dim.shares) for dim in self.dims if dim.shares)
            if key not in made:
                made[key] = self._message(peer, wires)
            found[peer] = made[key]
        return found

    def _message(self, peer: int, wires: Sequence[torch.dtype]) -> list[Tensor]:
        block, shapes = self.of(peer), self.shapes(peer)
        message = []
        for some in _together(shapes, wires):
            tensors = [block.tensors[n] for n in some]
            (first, *more), wire = tensors, wires[some[0]]
            if not more and block.rows is None and first.dtype == wire and first.is_contiguous():
                message.append(first.view(-1))
                continue
            flat, parts = _buffer(first, [shapes[n] for n in some], wire)
            tokens = [block.tokens[n] for n in some]
            copy(TokenBlock(tensors, tokens, block.rows), TokenBlock(parts, tokens))
            message.append(flat)
        return message


def buffers(
    like: Tensor, shapes: Sequence[Sequence[int]], wires: Sequence[torch.dtype]
) -> tuple[list[Tensor], list[Tensor]]:
    """Flat buffers for a message of parts of these shapes and dtypes, and the parts in them.

    Parts of one dtype that are not large share a buffer, because each buffer that is sent and
    received costs the host some time, 17 us in ``examples/benchmark/parts/message_time.py``.
    """
    flats, parts = [], dict[int, Tensor]()
    for some in _together(shapes, wires):
        flat, inside = _buffer(like, [shapes[n] for n in some], wires[some[0]])
        flats.append(flat)
        parts.update(zip(some, inside, strict=True))
    return flats, [parts[n] for n in range(len(shapes))]


def bytes_of(shapes: Sequence[Sequence[int]], wires: Sequence[torch.dtype]) -> int:
    """Bytes of the parts of a message."""
    return sum(prod(shape) * wire.itemsize for shape, wire in zip(shapes, wires, strict=True))


def _together(
    shapes: Sequence[Sequence[int]], wires: Sequence[torch.dtype]
) -> Iterator[Sequence[int]]:
    """Which parts share a buffer, the same on both ends of a message."""
    of_dtype: dict[torch.dtype, list[int]] = {}
    for n, wire in enumerate(wires):
        of_dtype.setdefault(wire, []).append(n)
    for wire, some in of_dtype.items():
        small = bytes_of([shapes[n] for n in some], [wire] * len(some)) <= SMALL_BYTES
        yield from [some] if small else ([n] for n in some)


def _buffer(
    like: Tensor, shapes: Sequence[Sequence[int]], wire: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """A flat buffer, and contiguous tensors of these shapes in it, each aligned."""
    step = max(ALIGNED_BYTES // wire.itemsize, 1)
    counts = [prod(shape) for shape in shapes]
    starts = [0, *accumulate(-(-count // step) * step for count in counts)]
    flat = like.new_empty(starts[-2] + counts[-1], dtype=wire)
    both = zip(shapes, counts, starts, strict=False)
    return flat, [flat[start : start + count].view(*shape) for shape, count, start in both]
