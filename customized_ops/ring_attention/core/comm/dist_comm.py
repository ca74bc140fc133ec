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

from annotations.groups import another_group

from ..plan.cost import H200_NCCL, HELD_SHARDS
from ..topology import Topology
from .link_probe import measured
from .messages import Comm, Messages, Reduction
from .patience import Patience

HOSTS = "SEQSHARD_HOSTS"  # the environment variable that says which ranks of the world share one
COSTS = "SEQSHARD_COSTS"  # and that of rates of the CostModel


class DistComm(Comm):
    """Over a torch process group: point-to-point messages, gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.group_name, group.rank(), group.size())
        self._group = self._messages = group
        backends = str(dist.get_backend_config(group))
        self.compares = "gloo" in backends and "nccl" not in backends
        self._patience = Patience(group) if self.compares else None
        if "nccl" in backends:
            self.costs = H200_NCCL
        if (topology := self._topology()) is not None:
            self.costs = replace(self.costs, topology=topology, held_shards=HELD_SHARDS)
        self.costs = self.costs.with_rates(os.environ.get(COSTS, ""), COSTS)

    def connect(self, device: torch.device) -> None:
        """Before the first messages between GPUs; all ranks call this together.

        Messages between GPUs have an NCCL group of their own, whose kernels start before those of
        attention that wait for a place on the same GPU (two H100s, causal 128k whose keys come in
        two steps: 453 ms without this, 406 ms with it), and which no collective of the caller's
        holds up.
        """
        ranks = tuple(dist.get_process_group_ranks(self._group))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        self._messages = another_group(ranks, options)
        # NCCL connects a group at its first operation and wants all ranks there; an exchange may
        # leave some out. (A collective would make buffers of its own, which nothing here needs.)
        after, before = ((self.rank + way) % self.size for way in (1, -1))
        one, other = torch.zeros(2, device=device)
        self.start({after: [one]}, {before: [other]})()
        rates = measured(self, self.costs, device)
        self.costs = rates.with_rates(os.environ.get(COSTS, ""), COSTS)

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
        every = [message for side in (send, receive) for each in side.values() for message in each]
        on_cpu = bool(every) and every[0].is_cpu  # a group may have a backend for each device
        group = self._group if on_cpu else self._messages
        # Sends in rank order from the next peer on, so that no rank is everybody's first target.
        after = lambda peer: (peer - self.rank) % self.size  # noqa: E731
        ops = [
            dist.P2POp(operation, message, group=group, group_peer=p)
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
        return partial(self._wait, wait) if works and on_cpu else wait

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
