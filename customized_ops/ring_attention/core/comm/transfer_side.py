"""Tokens of tensors that leave for peers, or arrive from them.

Tokens that are one range of a tensor are a view of it. Scattered tokens are moved by their indices
straight to their places: several tensors at once, into another dtype if need be, in one pass over
memory (``merge.rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..merge import merge_
from ..merge.rows import add_rows, copy_rows
from ..plan.exchanges.exchange import Where

Shapes = tuple[tuple[int, ...], ...]
Wires = tuple[torch.dtype, ...]  # dtypes of the parts of a message
Place = tuple[tuple[int, ...], list[int], int]  # shape, strides and start of a part in its buffer
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

    def shapes(self, peer: int) -> Shapes:
        """Those of all tensors."""
        count = self.peers[peer].count
        both = zip(self.tensors, self.dims, strict=True)
        return tuple([tuple(dim.shape(t, count, peer)) for t, dim in both])

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

    def messages(self, wires: Wires, but: int) -> dict[int, list[Tensor]]:
        """All parts but one peer's, in buffers of the :func:`form` with the dtypes ``wires``. A
        part that is one block of memory and has a buffer to itself is not copied; peers that are
        sent the same tokens and heads share buffers."""
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

    def _message(self, peer: int, wires: Wires) -> list[Tensor]:
        block, message = self.of(peer), []
        for some, wire, length, places in form(self.shapes(peer), wires).groups:
            tensors, tokens = [block.tensors[n] for n in some], [block.tokens[n] for n in some]
            first, *more = tensors
            if not more and block.rows is None and first.dtype == wire and first.is_contiguous():
                message.append(first.view(-1))
                continue
            flat = first.new_empty(length, dtype=wire)
            parts = [flat.as_strided(*place) for place in places]
            copy(TokenBlock(tensors, tokens, block.rows), TokenBlock(parts, tokens))
            message.append(flat)
        return message


class Group(NamedTuple):
    """Parts of a message that share a flat buffer.

    Attributes:
        some: which parts.
        wire: their dtype in the buffer.
        length: of the buffer.
        places: of each in it.
    """

    some: list[int]
    wire: torch.dtype
    length: int
    places: list[Place]


class Form(NamedTuple):
    """How a message lies in buffers, the same on both of its ends; ``nbytes``: of its parts."""

    groups: list[Group]
    nbytes: int


@lru_cache(maxsize=1024)
def form(shapes: Shapes, wires: Wires) -> Form:
    """The form of a message of parts of these shapes, in these dtypes.

    Parts of one dtype that are not large share a buffer, because each buffer that is sent and
    received costs the host some time, 17 us in ``examples/benchmark/parts/message_time.py``.
    """
    counts, of_dtype = [prod(shape) for shape in shapes], dict[torch.dtype, list[int]]()
    for n, wire in enumerate(wires):
        of_dtype.setdefault(wire, []).append(n)
    groups = []
    for wire, some in of_dtype.items():
        small = sum(counts[n] for n in some) * wire.itemsize <= SMALL_BYTES
        for together in [some] if small else [[n] for n in some]:
            step, end = max(ALIGNED_BYTES // wire.itemsize, 1), 0
            places: list[Place] = []
            for n in together:
                start = -(-end // step) * step
                strides = [prod(shapes[n][dim + 1 :]) for dim in range(len(shapes[n]))]
                places.append((shapes[n], strides, start))
                end = start + counts[n]
            groups.append(Group(together, wire, end, places))
    return Form(groups, sum(n * wire.itemsize for n, wire in zip(counts, wires, strict=True)))


def buffers(like: Tensor, of: Form) -> tuple[list[Tensor], list[Tensor]]:
    """Flat buffers for a message, and its parts in them, each contiguous and aligned."""
    flats, parts = [], dict[int, Tensor]()
    for some, wire, length, places in of.groups:
        flat = like.new_empty(length, dtype=wire)
        flats.append(flat)
        for n, place in zip(some, places, strict=True):
            parts[n] = flat.as_strided(*place)
    return flats, [parts[n] for n in range(len(parts))]
