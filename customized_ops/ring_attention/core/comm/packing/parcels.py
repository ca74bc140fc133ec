"""A rank's messages in an exchange: packed from tensors, and put into tensors where they arrive.

Small messages are packed together, in one buffer for all peers, and so are those that arrive: then
it takes the host one launch where each peer would take several. A large message has a buffer for
each tensor, or none where its tokens lie in one block of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...merge.rows import sum_rows
from ...plan.exchanges.peer_tokens import TokenList, Where
from ...tape import allocate
from ..rank_group import Messages
from ..transfer_side import Put, TokenBlock, TransferSide, add, copy, place
from .forms import Wires, form_of

PeerParts = dict[int, Sequence[Tensor]]  # peer -> what came from it


class Arrived(NamedTuple):
    """What came from peers: parts of lists of them, and of single ones; or, if kernels can read all
    where it is, ``in_place``: all that is wanted, in order, with room for the rank's own tokens."""

    lists: list[tuple[TokenList, list[Tensor]]]
    alone: PeerParts
    in_place: list[Tensor] | None = None


class Parcels:
    """The messages of one side of an exchange; ``wires``: the dtypes in which the tensors travel.
    ``rank`` sends itself nothing."""

    def __init__(self, side: TransferSide, wires: Wires, rank: int) -> None:
        self._side, self._wires = side, wires
        self._form = form_of(side, wires, rank)

    @property
    def nbytes(self) -> int:
        """Of all messages."""
        return self._form.nbytes

    def pack(self) -> Messages:
        """The messages, with what they carry. Peers with the same tokens and heads share one."""
        found: Messages = {}
        for form in self._form.shared:
            messages, parts = form.make(self._side.tensors[0])
            block = self._side.block(form.of.where, form.peer)
            copy(block, TokenBlock(parts, block.tokens))
            found |= messages
        known: dict[tuple[Where, int], list[Tensor]] = {}
        for peer in self._form.large:
            key = self._side.peers[peer], peer % self._form.team_size
            if key not in known:
                known[key] = self._pack_alone(peer)
            found[peer] = known[key]
        return found

    def empty(self, like: Tensor, whole: int | None = None) -> tuple[Messages, Arrived]:
        """Messages that are to be received, on the device of ``like``, and their parts; ``whole``:
        how many tokens are wanted, if they may stay where they arrive."""
        form = self._form.in_place
        if form is not None and form.tokens == whole:
            found, parts = form.make(like)
            return found, Arrived([], {}, parts)
        found, arrived = Messages(), Arrived([], {})
        for form in self._form.apart:
            messages, parts = form.make(like)
            arrived.lists.append((form.of, parts))
            found |= messages
        for peer in self._form.large:
            shapes = self._side.shapes(peer, self._side.peers[peer].count)
            both = zip(shapes, self._wires, strict=True)
            arrived.alone[peer] = [allocate(like.new_empty, s, dtype=wire) for s, wire in both]
            found[peer] = [part.view(-1) for part in arrived.alone[peer]]
        return found, arrived

    def _pack_alone(self, peer: int) -> list[Tensor]:
        """A message whose tensors have a buffer each. What is one block of memory is not copied."""
        block, message = self._side.of(peer), []
        shapes = self._side.shapes(peer, self._side.peers[peer].count)
        both = zip(block.tensors, block.tokens, shapes, self._wires, strict=True)
        for tensor, tokens, shape, wire in both:
            if block.rows is not None or tensor.dtype != wire or not tensor.is_contiguous():
                packed = allocate(tensor.new_empty, shape, dtype=wire)
                copy(TokenBlock([tensor], [tokens], block.rows), TokenBlock([packed], [tokens]))
                tensor = packed
            message.append(tensor.view(-1))
        return message


def put_all(put: Put, side: TransferSide, arrived: Arrived) -> None:
    """Put what has arrived into the tensors of ``side``. Where several peers have results for a
    token, those of lists come first, both in rank order."""
    for each, parts in arrived.lists:
        if put in (place, add) and not each.repeats:
            put(side.block(each.where, next(iter(each.rows))), parts)
        elif put is not add or not each.summed or not _summed(side, each, parts):
            for peer in each.rows:
                put(*_of_peer(side, each, parts, peer))
    for peer in sorted(arrived.alone):
        put(side.of(peer), arrived.alone[peer])


def _summed(side: TransferSide, of: TokenList, parts: Sequence[Tensor]) -> bool:
    """Add a list's rows to their tokens in one launch; False where it takes several."""
    totals, dims = side.of_share(next(iter(of.rows))), [dim.tokens for dim in side.dims]
    return sum_rows(parts, totals, dims, *of.sums)


def _of_peer(
    side: TransferSide, of: TokenList, parts: Sequence[Tensor], peer: int
) -> tuple[TokenBlock, list[Tensor]]:
    """One peer's tokens in place, and its part of a list's parts."""
    first, count = of.rows[peer]
    both = zip(parts, side.dims, strict=True)
    cut = [part.narrow(dim.tokens, first, count) for part, dim in both]
    if side.peers[peer].ranges is None:
        return side.of(peer), cut
    shared = of.shared or of
    block = side.block(shared.where, peer)
    assert block.rows is not None, "a list of scattered tokens is scattered"
    return block._replace(rows=block.rows.narrow(0, *shared.rows[peer])), cut
