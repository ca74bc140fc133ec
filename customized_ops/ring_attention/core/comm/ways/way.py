"""Groups that carry messages, each to and from some peers."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from annotations.groups import another_group

from ...topology import Topology
from ..rank_group import Messages
from .nccl import Operation, Queue, Queued, together

TAG = 0  # of all messages: those of two ranks are matched by their order


class Way(NamedTuple):
    """A group that carries messages to and from some of its ranks.

    Attributes:
        first: the rank that is the group's first; its other ranks follow this one.
        queue: what passes the messages; None: torch does.
    """

    group: dist.ProcessGroup
    peers: frozenset[int]
    first: int = 0
    queue: Queue | None = None

    def operations(self, rank: int, send: Messages, receive: Messages) -> list[Operation]:
        """Those of ``rank``'s messages that go this way."""
        found: list[Operation] = []
        for sends, messages in ((True, send), (False, receive)):
            peers = sorted(messages.keys() & self.peers)
            # In rank order from the next peer on, so that no rank is everybody's first target.
            after = bisect(peers, rank)
            for peer in peers[after:] + peers[:after]:
                found += [(sends, message, peer - self.first) for message in messages[peer]]
        return found

    def introduce(self, rank: int, device: torch.device) -> None:
        """Send a message around the group, from each rank to the next. NCCL connects a group at its
        first operation, in which all ranks must take part; an exchange may leave some out. (A
        collective would make buffers of its own, which nothing here needs.)"""
        place, size = rank - self.first, self.group.size()
        after, before = (self.first + (place + step) % size for step in (1, -1))
        mine, theirs = (torch.full((1,), n, device=device) for n in (rank, -1))
        around = self._replace(peers=frozenset((after, before)))
        for work in start([around], rank, {after: [mine]}, {before: [theirs]}):
            work.wait()
        assert int(theirs) == before, f"rank {before} was to be the one before, not {int(theirs)}"

    def forget(self) -> None:
        """Free what the queue keeps of passes that ended in an error, where it has arrived."""
        if self.queue is not None and self.queue.kept:
            self.queue.forget()

    def direct(self, device: torch.device) -> Way:
        """This way by NCCL's own functions, if they can be called. Its group is connected."""
        return self._replace(queue=Queue.of(self.group._get_backend(device), device))


def start(
    ways: Sequence[Way], rank: int, send: Messages, receive: Messages
) -> list[dist.Work] | list[Queued]:
    """Begin to pass messages of ``rank``, each on the way to its peer.

    Returns:
        What to wait for.
    Raises:
        RuntimeError: a connection is closed, or its group was aborted.
    """
    every = [(way, way.operations(rank, send, receive)) for way in ways]
    every = [(way, operations) for way, operations in every if operations]
    queued = [(way.queue, operations) for way, operations in every if way.queue is not None]
    if len(queued) < len(every):
        return [work for way, operations in every for work in _by_torch(way, operations)]
    return together(queued)


def _by_torch(way: Way, operations: list[Operation]) -> list[dist.Work]:
    """Pass messages as ``dist.batch_isend_irecv`` does, in less of the host's time."""
    group, device = way.group, operations[0][1].device
    coalesces = device.type != "cpu" and group._get_backend(device).supports_coalescing
    if coalesces:
        group._start_coalescing(device)
    works = [
        (group.send if sends else group.recv)([message], place, TAG)
        for sends, message, place in operations
    ]
    return [group._end_coalescing(device)] if coalesces else works


def ways_apart(
    ranks: Sequence[int],
    rank: int,
    topology: Topology | None,
    options: Callable[[], Any] = lambda: None,
) -> list[Way]:
    """New groups of these global ranks, with these options of NCCL, for messages of ``rank``, an
    index of them. All ranks call this together.

    On one host there is one group. Over several, each host has one, and there is another for what
    crosses, because NCCL carries out the operations of a group one after the other.

    The ranks of a host have a group to themselves because NCCL gives any two ranks of a group as
    few channels as two of different hosts have: H100s sent 34 GB/s over NVLink in a group over two
    hosts, a tenth of what they can.
    """
    near: list[int] = []
    if topology is not None:
        near = np.flatnonzero(topology.host_of == topology.host_of[rank]).tolist()
    across = Way(another_group(tuple(ranks), options()), frozenset(range(len(ranks))) - {*near})
    if len(near) < 2:
        return [across]
    inside = another_group(tuple(ranks[peer] for peer in near), options())
    return [Way(inside, frozenset(near), near[0]), across]


def abort(ways: Sequence[Way]) -> None:
    """End messages that are on their way; the groups are of no use after that."""
    for way in ways:
        with suppress(RuntimeError):  # the other groups are to end, too
            way.group.abort()
