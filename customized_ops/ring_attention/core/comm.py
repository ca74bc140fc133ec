"""Moving token ranges between the ranks of a group.

:class:`Comm` says what the executor may ask; subclasses only know how to pass flat buffers between
peers. Groups are passed in: there is no global state, and ranks are always ranks in the group.

    fetch       each rank receives token ranges of its peers' tensors    (k, v; rows of q)
    send_home   the reverse: results for received tokens go home and are
                placed, added up or merged there                         (out, lse; dk, dv; dq)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_plan import Exchange, Table

Messages = dict[int, Tensor]  # peer -> flat buffer


class Dims(NamedTuple):
    """Which dims of a tensor are its tokens and its heads."""

    tokens: int
    heads: int


ROWS, STATS = Dims(tokens=1, heads=2), Dims(tokens=2, heads=1)  # [b, l, h, d] and [b, h, l]

Put = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


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
    """Bytes this rank has sent to and received from other ranks through one Comm."""

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
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.counters = Counters()

    @abstractmethod
    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """Begin passing buffers between peers; the returned function waits for all of them.

        Every rank of the group calls this in the same order with matching buffers.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order. For checks, not for the hot path."""

    def fetch(self, exchange: Exchange, tensors: Sequence[Tensor], dims: Sequence[Dims]) -> Pending:
        """Receive tokens of each of ``tensors`` as the exchange says.

        Args:
            tensors: the rank's own, with all heads; a peer gets its share of them.
        Returns:
            Pending list of tensors as ``tensors``, but with ``exchange.tokens`` tokens and this
            rank's share of the heads.
        """
        outgoing, buffers = [], []
        for tensor, dim in zip(tensors, dims, strict=True):
            outgoing.append(_cut(tensor, dim, exchange.send, exchange.team_size))
            shape = list(tensor.shape)
            shape[dim.tokens] = exchange.tokens
            shape[dim.heads] //= exchange.team_size
            buffers.append(tensor.new_empty(shape))
        places = [_cut(t, dim, exchange.recv) for t, dim in zip(buffers, dims, strict=True)]
        finish = self._pass(outgoing, places, [t.dtype for t in tensors], place)
        return Pending(lambda: (finish(), buffers)[1])

    def send_home(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Sequence[Tensor],
        dims: Sequence[Dims],
        put: Put,
    ) -> Pending:
        """Send results for fetched tokens back to the tokens' owners.

        There ``put(places, parts)`` is called for each range of tokens that arrives, with views of
        ``into`` and the parts of all ``results``; in rank order, so that sums do not depend on who
        was first.
        """
        outgoing = [_cut(t, dim, exchange.recv) for t, dim in zip(results, dims, strict=True)]
        places = [
            _cut(t, dim, exchange.send, exchange.team_size)
            for t, dim in zip(into, dims, strict=True)
        ]
        return Pending(self._pass(outgoing, places, [t.dtype for t in results], put))

    def _pass(
        self,
        outgoing: list[dict[int, list[Tensor]]],
        places: list[dict[int, list[Tensor]]],
        dtypes: list[torch.dtype],
        put: Put,
    ) -> Callable[[], None]:
        """One message a peer and tensor; on arrival ``put`` for each of its ranges."""
        waits, arrived = [], []
        for sources, targets, dtype in zip(outgoing, places, dtypes, strict=True):
            send = {p: _pack(parts) for p, parts in sources.items() if p != self.rank}
            receive = {
                p: parts[0].new_empty(sum(part.numel() for part in parts), dtype=dtype)
                for p, parts in targets.items()
                if p != self.rank
            }
            self.counters.sent_bytes += sum(m.nbytes for m in send.values())
            self.counters.received_bytes += sum(m.nbytes for m in receive.values())
            waits.append(self.start(send, receive))
            arrived.append(receive)

        def finish() -> None:
            for wait in waits:
                wait()
            for peer in sorted(places[0]):
                parts = [
                    sources[peer] if peer == self.rank else _unpack(received[peer], targets[peer])
                    for sources, targets, received in zip(outgoing, places, arrived, strict=True)
                ]
                ranges = zip(*(targets[peer] for targets in places), strict=True)
                for where, what in zip(ranges, zip(*parts, strict=True), strict=True):
                    put(where, what)

        return finish


def _cut(tensor: Tensor, dim: Dims, ranges: Table, team_size: int = 1) -> dict[int, list[Tensor]]:
    """Views of the ranges (peer, start, count) of ``tensor``, by peer; of its share of the heads
    where ``tensor`` has all of them."""
    views: dict[int, list[Tensor]] = {}
    heads = tensor.shape[dim.heads] // team_size
    for peer, start, count in ranges.tolist():
        view = tensor.narrow(dim.tokens, start, count)
        if team_size > 1:
            view = view.narrow(dim.heads, peer % team_size * heads, heads)
        views.setdefault(peer, []).append(view)
    return views


def _pack(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _unpack(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = message.split([part.numel() for part in like])
    return [part.view(place.shape) for part, place in zip(parts, like, strict=True)]


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
            dist.P2POp(dist.isend, send[p], group=self._group, group_peer=p)
            for p in sorted(send, key=after)
        ] + [
            dist.P2POp(dist.irecv, receive[p], group=self._group, group_peer=p)
            for p in sorted(receive, key=after)
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
