"""Moving token ranges between the ranks of a group.

:class:`Comm` says what the executor may ask; subclasses only know how to pass flat buffers between
peers. Groups are passed in: there is no global state, and ranks are always ranks in the group.

    fetch       each rank receives token ranges of its peers' tensors    (k, v; rows of q)
    send_home   the reverse: results for received tokens go home and are
                placed, added up or merged there                         (out, lse; dk, dv; dq)
    all_reduce  every rank gets the sum or the maximum of all ranks'     (statistics of a loss)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, Where

Messages = dict[int, list[Tensor]]  # peer -> flat buffers, in order
Reduction = Literal["sum", "max"]


class Dims(NamedTuple):
    """Which dims of a tensor are its tokens and its heads."""

    tokens: int
    heads: int


ROWS, STATS = Dims(tokens=1, heads=2), Dims(tokens=2, heads=1)  # [b, l, h, d] and [b, h, l]

Into = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
Put = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
SeenBy = Callable[[int], Exchange]


def place(places: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Write arrived parts over their places."""
    for where, part in zip(places, parts, strict=True):
        where.copy_(part)


def add(places: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Add arrived parts to their places."""
    for where, part in zip(places, parts, strict=True):
        where.add_(part)


@dataclass
class Counters:
    """Bytes this rank has sent to and received from other ranks through one Comm; of an all-reduce,
    those of a ring."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Pending:
    """Something that is on its way; ``wait()`` returns it."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self) -> Any:
        """Block until it is here (on a GPU: until the stream may use it)."""
        return self._finish()


class Comm(ABC):
    """A group of ranks that pass each other token ranges.

    Attributes:
        rank, size: this rank in the group, and how many there are.
        name: stands for the group in a graph; :func:`comm_by_name` finds the Comm again.
        common_lengths: numbers of tokens that all ranks are known to have held alike.
        ahead: how many exchanges it pays to ask for before the first has arrived.
    """

    ahead = 1

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.counters = Counters()
        self.common_lengths: set[int] = set()

    @abstractmethod
    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """Begin passing buffers between peers, all at once; the returned function waits for them.

        Every rank of the group calls this in the same order with matching buffers.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order. For checks, not for the hot path."""

    @abstractmethod
    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """The part of :meth:`all_reduce` that depends on how ranks are connected."""

    def all_reduce(self, tensor: Tensor, how: Reduction) -> Tensor:
        """Combine every rank's ``tensor``, of one shape and dtype, element by element.

        Returns:
            ``tensor``, overwritten with the same values on every rank.
        """
        ring_bytes = 2 * tensor.nbytes * (self.size - 1) // self.size
        self.counters.sent_bytes += ring_bytes
        self.counters.received_bytes += ring_bytes
        self.combine(tensor, how)
        return tensor

    def begin(self) -> None:  # noqa: B027, most need not know
        """Before the first exchange of a forward or backward pass; on every rank, or on none."""

    def end(self) -> None:  # noqa: B027
        """After the last use of what was received in the pass."""

    def fetch(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        seen_by: SeenBy | None = None,
    ) -> Pending:
        """Receive tokens of each of ``tensors`` as the exchange says.

        Args:
            tensors: the rank's own, with all heads; a peer gets its share of them.
            seen_by: from a peer to the exchange as it is there; with it, and between :meth:`begin`
                and :meth:`end`, a Comm may write straight to where the peer reads.
        Returns:
            Pending list of tensors as ``tensors``, but with ``exchange.tokens`` tokens and this
            rank's share of the heads.
        """
        buffers = []
        for tensor, dim in zip(tensors, dims, strict=True):
            shape = list(tensor.shape)
            shape[dim.tokens] = exchange.tokens
            shape[dim.heads] //= exchange.team_size
            buffers.append(tensor.new_empty(shape))
        source = Side(tensors, dims, exchange.sent, exchange.team_size)
        target = Side(buffers, dims, exchange.received, 1)
        arrive = self._pass(source, target.peers, target.shape)

        def finish() -> list[Tensor]:
            for peer, parts in sorted(arrive().items()):
                target.put(peer, parts, place)
            return buffers

        return Pending(finish)

    def send_home(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Into,
        dims: Sequence[Dims],
        put: Put,
        dtype: torch.dtype | None = None,
        seen_by: SeenBy | None = None,
    ) -> Pending:
        """Send results for fetched tokens back to the tokens' owners.

        There ``put(places, parts)`` is called for each peer, with the tokens' rows of ``into`` and
        what arrived for them; in rank order, so that sums do not depend on who was first.

        Args:
            into: tensors of all of the rank's own tokens, or what makes them once results are
                here, so that they may be sent before there is a place for them.
            dtype: what the results travel in, whatever they are in; None sends them as they are,
                in dtypes that are the same on every rank. What a rank sends itself is left alone.
            seen_by: see :meth:`fetch`.
        """
        source = Side(results, dims, exchange.received, 1)
        shape = source.with_tokens(exchange.sent)
        arrive = self._pass(source, exchange.sent, shape, dtype)
        return Pending(lambda: deliver(arrive(), into, dims, exchange, put))

    def _pass(
        self,
        source: Side,
        peers: Mapping[int, Where],
        shape: Callable[[int, int], list[int]],
        dtype: torch.dtype | None = None,
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """The parts of all tensors at once, so that NCCL moves them in one kernel.

        Args:
            peers: who sends something here. shape: of the n-th tensor's part from a peer.
        Returns:
            Waits for the parts of each peer and returns them; one's own are as they were.
        """
        wires = [dtype or tensor.dtype for tensor in source.tensors]
        # Where a part is one block of memory it is sent from where it lies.
        send = {
            p: [source.take(n, p).to(wire).reshape(-1).contiguous() for n, wire in enumerate(wires)]
            for p in source.peers
            if p != self.rank
        }
        receive = {
            p: [
                source.tensors[n].new_empty(prod(shape(n, p)), dtype=wire)
                for n, wire in enumerate(wires)
            ]
            for p in peers
            if p != self.rank
        }
        self.counters.sent_bytes += sum(m.nbytes for each in send.values() for m in each)
        self.counters.received_bytes += sum(m.nbytes for each in receive.values() for m in each)
        wait = self.start(send, receive)

        def arrive() -> dict[int, list[Tensor]]:
            wait()
            return {
                p: [
                    source.take(n, p) if p == self.rank else receive[p][n].view(shape(n, p))
                    for n in range(len(wires))
                ]
                for p in peers
            }

        return arrive


@dataclass(frozen=True)
class Side:
    """Tensors whose tokens leave, or arrive.

    Attributes:
        peers: where the tokens of each peer are.
        team_size: a peer has this share of the heads of the tensors; 1: all that are there.
    """

    tensors: Sequence[Tensor]
    dims: Sequence[Dims]
    peers: Mapping[int, Where]
    team_size: int

    def shape(self, n: int, peer: int) -> list[int]:
        """Of the peer's part of tensor ``n``."""
        shape = list(self.tensors[n].shape)
        shape[self.dims[n].tokens] = self.peers[peer].count
        shape[self.dims[n].heads] //= self.team_size
        return shape

    def with_tokens(self, others: Mapping[int, Where]) -> Callable[[int, int], list[int]]:
        """Shapes of parts as :meth:`shape`, but of the tokens that ``others`` have."""
        return Side(self.tensors, self.dims, others, self.team_size).shape

    def take(self, n: int, peer: int) -> Tensor:
        """The peer's part of tensor ``n``: a view where its tokens are one range."""
        tensor, where = self._heads(n, peer), self.peers[peer]
        if where.indices is None:
            return tensor.narrow(self.dims[n].tokens, where.start, where.count)
        return tensor.index_select(self.dims[n].tokens, where.on(tensor.device))

    def put(self, peer: int, parts: Sequence[Tensor], put: Put) -> None:
        """Put arrived parts in the peer's place."""
        places = [self.take(n, peer) for n in range(len(self.tensors))]
        put(places, parts)
        where = self.peers[peer]
        if where.indices is not None:
            for n, changed in enumerate(places):
                tensor = self._heads(n, peer)
                tensor.index_copy_(self.dims[n].tokens, where.on(tensor.device), changed)

    def _heads(self, n: int, peer: int) -> Tensor:
        tensor, dim = self.tensors[n], self.dims[n].heads
        if self.team_size == 1:
            return tensor
        heads = tensor.shape[dim] // self.team_size
        return tensor.narrow(dim, peer % self.team_size * heads, heads)


def deliver(
    parts: Mapping[int, list[Tensor]],
    into: Into,
    dims: Sequence[Dims],
    exchange: Exchange,
    put: Put,
) -> None:
    """Put results that came home in their places, in rank order."""
    places = into() if callable(into) else into
    target = Side(places, dims, exchange.sent, exchange.team_size)
    for peer in sorted(parts):
        target.put(peer, parts[peer], put)


class DistComm(Comm):
    """Over a torch process group: point-to-point messages, gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.group_name, group.rank(), group.size())
        self._group = group
        if "nccl" in str(dist.get_backend_config(group)):
            # NCCL connects a group at its first operation and wants all ranks there; an exchange
            # may leave some out. All ranks of a group come here at their first op over it.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """See :meth:`Comm.start`."""
        # Sends in rank order from the next peer on, so that no rank is everybody's first target.
        after = lambda peer: (peer - self.rank) % self.size  # noqa: E731
        ops = [
            dist.P2POp(dist.isend, message, group=self._group, group_peer=p)
            for p in sorted(send, key=after)
            for message in send[p]
        ] + [
            dist.P2POp(dist.irecv, message, group=self._group, group_peer=p)
            for p in sorted(receive, key=after)
            for message in receive[p]
        ]
        works = dist.batch_isend_irecv(ops) if ops else []

        def finish() -> None:
            for work in works:
                work.wait()

        # The buffers live until the messages have left.
        finish.buffers = (send, receive)  # type: ignore[attr-defined]
        return finish

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """See :meth:`Comm.all_reduce`."""
        dense = tensor.contiguous()
        op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(dense, op=op, group=self._group)
        if dense is not tensor:
            tensor.copy_(dense)
