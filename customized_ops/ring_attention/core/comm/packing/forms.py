"""How parts of several tensors lie in flat buffers; the same on both ends of a message.

A form is worked out once for an exchange and all tensors of the same shapes, such as those of all
layers of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...plan.exchanges.peer_tokens import PeerTokens, TokenList, Where
from ...tape import allocate
from ..rank_group import Messages
from ..transfer_side import Shapes, TransferSide

SMALL_BYTES = 16 << 20  # up to which messages are packed together

Wires = tuple[torch.dtype, ...]  # dtypes of the parts of a message


class Part(NamedTuple):
    """A tensor in a buffer: which one, and its shape, strides and first element there."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Buffer(NamedTuple):
    """A flat buffer of a list of tokens. A row has a token of each of its tensors, which have one
    dtype, and as many dims: rows share no buffer with their statistics, which would leave them
    unaligned.

    Attributes:
        pieces: elements of each piece, one after the other.
        room: elements that follow them, for tokens of the rank's own.
    """

    wire: torch.dtype
    parts: list[Part]
    pieces: list[int]
    room: int


class ListForm(NamedTuple):
    """The tokens of a list of peers in buffers.

    Attributes:
        peer: one of the peers, all of which have its share of the heads.
        piece_of: which piece of each buffer is a peer's; peers with the same tokens may share one.
        tokens: how many there is room for.
    """

    of: TokenList
    peer: int
    buffers: list[Buffer]
    piece_of: dict[int, int]
    tokens: int

    def make(self, like: Tensor) -> tuple[Messages, list[Tensor]]:
        """New buffers, on the device of ``like``: as messages, and the tensors in them."""
        parts, pieces = dict[int, Tensor](), []
        for wire, some, counts, room in self.buffers:
            flat = allocate(like.new_empty, sum(counts) + room, dtype=wire)
            for number, shape, strides, start in some:
                parts[number] = flat.as_strided(shape, strides, start)
            several = len(counts) > 1 or room
            pieces.append(torch.split_with_sizes(flat, [*counts, room]) if several else [flat])
        messages = {peer: [each[n] for each in pieces] for peer, n in self.piece_of.items()}
        return messages, [parts[number] for number in range(len(parts))]


class Form:
    """The messages of one side of an exchange, for tensors of some shapes.

    Attributes:
        team_size: ranks that share out the heads.
        large: peers whose messages are not packed with others'.
        nbytes: of all messages.
        shared, apart: lists of small messages: those to send, where peers that are sent the same
            share one, and those to receive, one from each peer.
        in_place: the list of all messages that are received, if their tokens are the first ones, in
            order, and kernels can read them in the buffers. If the rank's own tokens come next,
            there is room for them.
    """

    def __init__(self, side: TransferSide, wires: Wires, rank: int) -> None:
        """See :func:`form_of`."""
        assert isinstance(side.peers, PeerTokens), "the peers of an exchange"
        # It does not keep the peers, which keep it: memory of tables is to go with its plan.
        peers, self._wires = side.peers, wires
        self._tokens = [dim.tokens for dim in side.dims]
        # Of a token, for each share of the heads.
        self.team_size = team = peers.team_size
        first = {peer % team: peer for peer in reversed(peers)}
        self._rows = {share: side.shapes(peer, 1) for share, peer in first.items()}
        row_bytes = {
            share: sum(prod(shape) * w.itemsize for shape, w in zip(shapes, wires, strict=True))
            for share, shapes in self._rows.items()
        }
        of_peer = {
            peer: where.count * row_bytes[peer % team]
            for peer, where in peers.items()
            if peer != rank
        }
        self.nbytes = sum(of_peer.values())
        self.large = [peer for peer, nbytes in of_peer.items() if nbytes > SMALL_BYTES]
        but = [rank, *self.large]
        known = {each: self._of_list(each) for each in peers.lists(but, shared=True)}
        self.shared = list(known.values())
        apart = peers.lists(but, shared=False)
        self.apart = [known.get(each) or self._of_list(each) for each in apart]
        self.in_place = self._in_place(peers.get(rank))

    def _in_place(self, own: Where | None) -> ListForm | None:
        if len(self.apart) != 1 or self.large:
            return None
        (form,) = self.apart
        of = form.of
        first = of.where.ranges is None and of.where.start == 0 and not of.repeats
        if not first or not all(map(_is_aligned, form.buffers)):
            return None
        if own is None:
            return form
        follow = own.ranges is None and own.start == of.where.count
        return self._of_list(of, own.count) if follow else None

    def _of_list(self, of: TokenList, room: int = 0) -> ListForm:
        peer = next(iter(of.rows))
        rows = self._rows[peer % self.team_size]
        pieces = sorted(set(of.rows.values()))
        buffers = [
            _buffer(wire, some, rows, self._tokens, [count for _, count in pieces], room)
            for wire, some in _alike(rows, self._wires)
        ]
        piece_of = {p: pieces.index(rows) for p, rows in of.rows.items()}
        tokens = sum(count for _, count in pieces) + room
        return ListForm(of, peer, buffers, piece_of, tokens)


def form_of(side: TransferSide, wires: Wires, rank: int) -> Form:
    """The form of the messages of a side.

    Args:
        wires: the dtypes in which the tensors travel.
        rank: which sends itself nothing.
    """
    assert isinstance(side.peers, PeerTokens), "the peers of an exchange"
    key = (*[t.shape for t in side.tensors], *side.dims, *wires, rank)
    forms = side.peers.forms
    if key not in forms:
        forms[key] = Form(side, wires, rank)
    found: Form = forms[key]
    return found


def _alike(rows: Shapes, wires: Wires) -> list[tuple[torch.dtype, list[int]]]:
    """Tensors that share a buffer, by number, after their dtype."""
    found: dict[tuple[torch.dtype, int], list[int]] = {}
    for number, wire in enumerate(wires):
        found.setdefault((wire, len(rows[number])), []).append(number)
    return [(wire, some) for (wire, _), some in found.items()]


def _buffer(
    wire: torch.dtype,
    some: list[int],
    rows: Shapes,
    tokens: Sequence[int],
    counts: list[int],
    room: int,
) -> Buffer:
    """The buffer of some tensors, of whose tokens each piece has one of ``counts``, and which has
    ``room`` for more; ``rows``: the shapes of one token; ``tokens``: which dim of each tensor that
    is."""
    width = sum(prod(rows[number]) for number in some)
    parts, start = [], 0
    for number in some:
        shape, token = list(rows[number]), tokens[number]
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        elements = prod(shape)
        shape[token], strides[token] = sum(counts) + room, width
        parts.append(Part(number, tuple(shape), tuple(strides), start))
        start += elements
    return Buffer(wire, parts, [count * width for count in counts], room * width)


def _is_aligned(buffer: Buffer) -> bool:
    """Whether kernels take the tensors of a buffer where they are: of batch 1, with a dense last
    dim, since kernels load 16 bytes at a time."""
    step = 16 // buffer.wire.itemsize
    return all(
        part.shape[0] == 1
        and part.strides[-1] == 1
        and not any(n % step for n in (*part.strides[:-1], part.start))
        for part in buffer.parts
    )
