"""Messages over a torch process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..plan.cost import H200_NCCL, HELD_SHARDS
from ..topology import Topology
from .messages import Comm, Messages, Reduction
from .patience import Patience

HOSTS = "SEQSHARD_HOSTS"  # the environment variable that says which ranks of the world share one
HELD = "SEQSHARD_HELD_SHARDS"  # and that of CostModel.held_shards


class DistComm(Comm):
    """Over a torch process group: point-to-point messages, gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.group_name, group.rank(), group.size())
        self._group = group
        backends = str(dist.get_backend_config(group))
        self.compares = "gloo" in backends and "nccl" not in backends
        self._patience = Patience(group) if self.compares else None
        if "nccl" in backends:
            self.costs = H200_NCCL
            # NCCL connects a group at its first operation and wants all ranks there; an exchange
            # may leave some out. All ranks of a group come here at their first op over it.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        if (topology := self._topology()) is not None:
            held = float(os.environ.get(HELD, HELD_SHARDS))
            self.costs = replace(self.costs, topology=topology, held_shards=held)

    def _topology(self) -> Topology | None:
        """The hosts of the group; None: one. ``SEQSHARD_HOSTS`` names those of the whole world, as
        :meth:`.Topology.parse` reads them.

        Raises:
            ValueError: it names more ranks than there are, or fewer.
        """
        if HOSTS in os.environ:
            world = Topology.parse(os.environ[HOSTS])
            if world.size != dist.get_world_size():
                raise ValueError(
                    f"{HOSTS}={world} has {world.size} ranks, there are {dist.get_world_size()}"
                )
            return Topology.of(world.host_of[dist.get_process_group_ranks(self._group)].tolist())
        # Ranks on CPUs do not meet here unless torchrun says that there are several hosts.
        local, every = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if self._patience is None if local is None else local != every:
            return Topology.of(self.all_gather_object(socket.gethostname()))
        return None

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        # Sends in rank order from the next peer on, so that no rank is everybody's first target.
        after = lambda peer: (peer - self.rank) % self.size  # noqa: E731
        ops = [
            dist.P2POp(operation, message, group=self._group, group_peer=p)
            for operation, messages in ((dist.isend, send), (dist.irecv, receive))
            for p in sorted(messages, key=after)
            for message in messages[p]
        ]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:  # a connection that is closed already
            if self._patience is None:
                raise
            self._patience.fail(self.now, error)

        def wait() -> None:
            for work in works:
                work.wait()

        # The buffers live until the messages have left.
        wait.buffers = (send, receive)  # type: ignore[attr-defined]
        return partial(self._wait, wait) if works and ops[0].tensor.is_cpu else wait

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._wait(partial(dist.all_gather_object, values, value, group=self._group))
        return values

    def tell_failure(self, error: BaseException) -> None:
        if self._patience is not None:
            self._patience.tell_failure(self.now, self.step, error)

    def _wait(self, function: Callable[[], None]) -> None:
        """``function()``, which waits for peers."""
        if self._patience is None:
            function()
        else:
            self._patience.wait(self.now, function)

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        dense = tensor.contiguous()
        op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        reduce = partial(dist.all_reduce, dense, op=op, group=self._group)
        if dense.is_cpu:
            self._wait(reduce)
        else:
            reduce()
        if dense is not tensor:
            tensor.copy_(dense)
