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
from ...plan.exchanges.peer_tokens import PeerTokens, TokenList, Where
from ..rank_group import Messages
from ..transfer_side import Put, TokenBlock, TransferSide, add, copy, place
from .forms import RowForm, Wires, row_form

SMALL_BYTES = 16 << 20  # up to which messages are packed together

PeerParts = dict[int, Sequence[Tensor]]  # peer -> what came from it


class Arrived(NamedTuple):
    """What came from peers: parts of lists of them, and of single ones."""

    lists: list[tuple[TokenList, list[Tensor]]]
    alone: PeerParts


class Parcels:
    """The messages of one side of an exchange.

    Attributes:
        nbytes: of all messages.
    """

    def __init__(self, side: TransferSide, wires: Wires, rank: int) -> None:
        """``wires``: the dtypes in which the tensors travel. ``rank`` sends itself nothing."""
        assert isinstance(side.peers, PeerTokens), "the peers of an exchange"
        self._side, self._wires, self._peers = side, wires, side.peers
        self._tokens = tuple([dim.tokens for dim in side.dims])
        forms, self._large, self.nbytes = dict[int, RowForm](), list[int](), 0
        for peer, where in self._peers.items():
            share = peer % self._peers.team_size
            if share not in forms:
                forms[share] = self._form(peer)
            nbytes = 0 if peer == rank else where.count * forms[share].row_bytes
            self.nbytes += nbytes
            if nbytes > SMALL_BYTES:
                self._large.append(peer)
        self._but = [rank, *self._large]

    def pack(self) -> Messages:
        """The messages, with what they carry. Peers with the same tokens and heads share one."""
        found: Messages = {}
        for each in self._peers.lists(self._but, shared=True):
            messages, parts = self._cut(each, self._side.tensors[0])
            block = self._side.block(each.where, next(iter(each.rows)))
            copy(block, TokenBlock(parts, block.tokens))
            found |= messages
        known: dict[tuple[Where, int], list[Tensor]] = {}
        for peer in self._large:
            key = self._peers[peer], peer % self._peers.team_size
            if key not in known:
                known[key] = self._pack_alone(peer)
            found[peer] = known[key]
        return found

    def empty(self, like: Tensor) -> tuple[Messages, Arrived]:
        """Messages that are to be received, on the device of ``like``, and their parts."""
        found, arrived = Messages(), Arrived([], {})
        for each in self._peers.lists(self._but, shared=False):
            messages, parts = self._cut(each, like)
            arrived.lists.append((each, parts))
            found |= messages
        for peer in self._large:
            shapes = self._side.shapes(peer, self._peers[peer].count)
            both = zip(shapes, self._wires, strict=True)
            arrived.alone[peer] = [like.new_empty(shape, dtype=wire) for shape, wire in both]
            found[peer] = [part.view(-1) for part in arrived.alone[peer]]
        return found, arrived

    def _form(self, peer: int) -> RowForm:
        return row_form(self._side.shapes(peer, 1), self._tokens, self._wires)

    def _cut(self, of: TokenList, like: Tensor) -> tuple[Messages, list[Tensor]]:
        """New buffers for a list: those of each peer, and the tensors in them."""
        peer = next(iter(of.rows))
        shapes, parts = self._side.shapes(peer, of.where.count), dict[int, Tensor]()
        messages: Messages = {peer: [] for peer in of.rows}
        for group in self._form(peer).groups:
            flat = like.new_empty(of.where.count * group.width, dtype=group.wire)
            parts.update(zip(group.some, group.views(flat, shapes), strict=True))
            pieces = {
                rows: flat.narrow(0, *(n * group.width for n in rows))
                for rows in set(of.rows.values())
            }
            for peer, rows in of.rows.items():
                messages[peer].append(pieces[rows])
        return messages, [parts[n] for n in range(len(parts))]

    def _pack_alone(self, peer: int) -> list[Tensor]:
        """A message whose tensors have a buffer each. What is one block of memory is not copied."""
        block, message = self._side.of(peer), []
        shapes = self._side.shapes(peer, self._peers[peer].count)
        both = zip(block.tensors, block.tokens, shapes, self._wires, strict=True)
        for tensor, tokens, shape, wire in both:
            if block.rows is not None or tensor.dtype != wire or not tensor.is_contiguous():
                packed = tensor.new_empty(shape, dtype=wire)
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
