"""Moving token ranges between the ranks of a group.

:class:`Comm` says what the executor may ask; subclasses only know how to pass flat buffers between
peers. Groups are passed in: there is no global state, and ranks are always ranks in the group.

    fetch    each rank receives token ranges of its peers' tensors     (k, v; given rows of q)
    give     the reverse: results for received tokens go home, placed  (out and lse of given rows)
    reduce   the reverse, added up where they land                     (dk, dv)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_plan import Exchange, Table

Messages = dict[int, Tensor]  # peer -> flat buffer


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

    def fetch(self, exchange: Exchange, tensors: Sequence[Tensor], dims: Sequence[int]) -> Pending:
        """Receive tokens of each of ``tensors`` as the exchange says.

        Args:
            tensors: local tensors whose dim ``dims[n]`` is the rank's tokens.
        Returns:
            Pending list of tensors as ``tensors``, but with ``exchange.tokens`` tokens.
        """
        outgoing = [_cut(t, dim, exchange.send) for t, dim in zip(tensors, dims, strict=True)]
        buffers = [_sized(t, dim, exchange.tokens) for t, dim in zip(tensors, dims, strict=True)]
        places = [_cut(t, dim, exchange.recv) for t, dim in zip(buffers, dims, strict=True)]
        finish = self._pass(outgoing, places, torch.Tensor.copy_)
        return Pending(lambda: (finish(), buffers)[1])

    def give(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Sequence[Tensor],
        dims: Sequence[int],
    ) -> Pending:
        """Send results for fetched tokens back and write them over the tokens' rows of ``into``."""
        return self._back(exchange, results, into, dims, torch.Tensor.copy_)

    def reduce(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Sequence[Tensor],
        dims: Sequence[int],
    ) -> Pending:
        """Send results for fetched tokens back and add them to the tokens' rows of ``into``.

        Contributions are added in rank order, so that sums do not depend on arrival.
        """
        return self._back(exchange, results, into, dims, torch.Tensor.add_)

    def _back(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Sequence[Tensor],
        dims: Sequence[int],
        put: Callable[[Tensor, Tensor], Any],
    ) -> Pending:
        outgoing = [_cut(t, dim, exchange.recv) for t, dim in zip(results, dims, strict=True)]
        places = [_cut(t, dim, exchange.send) for t, dim in zip(into, dims, strict=True)]
        return Pending(self._pass(outgoing, places, put))

    def _pass(
        self,
        outgoing: list[dict[int, list[Tensor]]],
        places: list[dict[int, list[Tensor]]],
        put: Callable[[Tensor, Tensor], Any],
    ) -> Callable[[], None]:
        """One message a peer and tensor; on arrival ``put(place, part)`` for each of its ranges."""
        finishers = []
        for sources, targets in zip(outgoing, places, strict=True):
            send = {p: _pack(parts) for p, parts in sources.items() if p != self.rank}
            receive = {
                p: parts[0].new_empty(sum(part.numel() for part in parts))
                for p, parts in targets.items()
                if p != self.rank
            }
            self.counters.sent_bytes += sum(m.nbytes for m in send.values())
            self.counters.received_bytes += sum(m.nbytes for m in receive.values())
            finishers.append((self.start(send, receive), sources, targets, receive))

        def finish() -> None:
            for wait, sources, targets, received in finishers:
                wait()
                for peer in sorted(targets):
                    parts = (
                        sources[peer]
                        if peer == self.rank
                        else _unpack(received[peer], targets[peer])
                    )
                    for place, part in zip(targets[peer], parts, strict=True):
                        put(place, part)

        return finish


def _cut(tensor: Tensor, dim: int, ranges: Table) -> dict[int, list[Tensor]]:
    """Views of the ranges (peer, start, count) of ``tensor``, by peer."""
    views: dict[int, list[Tensor]] = {}
    for peer, start, count in ranges.tolist():
        views.setdefault(peer, []).append(tensor.narrow(dim, start, count))
    return views


def _sized(tensor: Tensor, dim: int, tokens: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = tokens
    return tensor.new_empty(shape)


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
