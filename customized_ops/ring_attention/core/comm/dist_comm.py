"""Messages over a torch process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from annotations.groups import another_group
from annotations.waiting import tell

from ..plan.cost_model import H200_NCCL, HELD_SHARDS
from ..topology import Topology
from .links.host_names import host_here, names_of_hosts
from .links.kept_links import kept_or_probed
from .links.link_probe import hosts_of, probed
from .messages import Comm
from .patience import Patience
from .rank_group import Messages, Reduction
from .signals.stamps import Stamps

HOSTS = "SEQSHARD_HOSTS"  # an environment variable: which ranks of the world share a host
COSTS = "SEQSHARD_COSTS"  # an environment variable: rates of the CostModel
TAG = 0  # of all messages: those of two ranks are matched by their order
GATHERED = 1 / 8  # the part of a GPU's memory that a pass may fill with keys of other ranks


class Way(NamedTuple):
    """A group that carries messages to and from some of its ranks.

    Attributes:
        first: the rank that is the group's first; its other ranks follow this one.
    """

    group: dist.ProcessGroup
    peers: frozenset[int]
    first: int = 0


class DistComm(Comm):
    """A Comm over a torch process group, by point-to-point messages of gloo or NCCL."""

    links_from = ""  # from where the speed of its links is known; "": it was not measured

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.group_name, group.rank(), group.size())
        self._group = group
        # The groups that carry messages of CPUs and of GPUs, and to which peers.
        self._of_cpus = self._of_gpus = [Way(group, frozenset(range(self.size)))]
        backends = str(dist.get_backend_config(group))
        self.compares = "gloo" in backends and "nccl" not in backends
        self._patience = Patience(group) if self.compares else None
        self._stamps: Stamps | None = None  # of messages between GPUs
        if "nccl" in backends:
            self._patience = Patience(group, torch.device("cuda", torch.cuda.current_device()))
            self.costs = H200_NCCL
        self._name_meetings()
        if (topology := self._topology()) is not None:
            self.costs = replace(self.costs, topology=topology, held_shards=HELD_SHARDS)
        self.costs = self.costs.with_rates(os.environ.get(COSTS, ""), COSTS)

    def _name_meetings(self) -> None:
        """Let waits compare the meetings of this rank with those of its peers."""
        if self._patience is not None:
            self._patience.meetings = self.meetings

    def connect(self, device: torch.device) -> None:
        """Prepare for messages between GPUs, before the first; all ranks call this together.

        Messages between GPUs have an NCCL group of their own. Its kernels start before those of
        attention that wait for a place on the same GPU (two H100s, causal 128k whose keys come in
        two steps: 453 ms without this, 406 ms with it). No collective of the caller holds it up.
        """
        options = partial(dist.ProcessGroupNCCL.Options, is_high_priority_stream=True)
        self._of_gpus = self.ways_apart(options)
        stop = partial(_abort, [way.group for way in self._of_gpus])
        self._stamps = self._made_stamps(device, stop)
        for way in self._of_gpus:
            self._introduce(way, device)
        hosts, backend = hosts_of(self, self.costs), str(dist.get_backend_config(self._group))
        probe = partial(probed, self, hosts, device)
        links, self.links_from = kept_or_probed(self, hosts, device, backend, probe)
        memory = min(self.all_gather_object(torch.cuda.get_device_properties(device).total_memory))
        self.costs = replace(links.in_place_of(self.costs), gathered_bytes=memory * GATHERED)
        self.costs = self.costs.with_rates(os.environ.get(COSTS, ""), COSTS)

    def _introduce(self, way: Way, device: torch.device) -> None:
        """Send a message around the group, from each rank to the next. NCCL connects a group at its
        first operation, in which all ranks must take part; an exchange may leave some out. (A
        collective would make buffers of its own, which nothing here needs.)"""
        place, size = self.rank - way.first, way.group.size()
        after, before = (way.first + (place + step) % size for step in (1, -1))
        mine, theirs = (torch.full((1,), n, device=device) for n in (self.rank, self.size))
        around = way._replace(peers=frozenset((after, before)))
        for work in self._begin(around, {after: [mine]}, {before: [theirs]}):
            work.wait()
        assert int(theirs) == before, f"rank {before} was to be the one before, not {int(theirs)}"

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the first rank that has one; the same on every rank."""
        return next((text for text in self.all_gather_object(problem) if text), None)

    def _made_stamps(self, device: torch.device, stop: Callable[[], None]) -> Stamps | None:
        """The rank's Stamps; None on every rank, with a warning, where one cannot have them."""
        stamps, problem = None, None
        try:
            assert self._patience is not None
            stamps = Stamps(self.rank, self.size, device, self._patience, stop)
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            problem = f"{type(error).__name__}: {error}"
        if (problem := self.first_problem(problem)) is None:
            return stamps
        tell(f"seqshard: GPUs of the group {self.name!r} do not compare their passes: {problem}")
        return None

    def ways_apart(self, options: Callable[[], Any] = lambda: None) -> list[Way]:
        """New groups, with these options of NCCL. All ranks call this together.

        On one host there is one group. Over several, each host has one, and there is another for
        what crosses, because NCCL carries out the operations of a group one after the other.

        The ranks of a host have a group to themselves because NCCL gives any two ranks of a group
        as few channels as two of different hosts have: H100s sent 34 GB/s over NVLink in a group
        over two hosts, a tenth of what they can.
        """
        ranks, topology = tuple(dist.get_process_group_ranks(self._group)), self.costs.topology
        everybody = frozenset(range(self.size))
        near: list[int] = []
        if topology is not None:
            near = np.flatnonzero(topology.host_of == topology.host_of[self.rank]).tolist()
        across = Way(another_group(ranks, options()), everybody - frozenset(near))
        if len(near) < 2:
            return [across]
        inside = another_group(tuple(ranks[peer] for peer in near), options())
        return [Way(inside, frozenset(near), near[0]), across]

    def _topology(self) -> Topology | None:
        """The hosts of the group; None: one. ``SEQSHARD_HOSTS`` gives the hosts of the whole world,
        in a form that :meth:`.Topology.parse` reads.

        Raises:
            ValueError: it gives more ranks than there are, or fewer.
        """
        if HOSTS in os.environ:
            world = Topology.parse(os.environ[HOSTS], HOSTS)
            if world.size != dist.get_world_size():
                raise ValueError(
                    f"{HOSTS}={world} has {world.size} ranks, there are {dist.get_world_size()}"
                )
            ranks = dist.get_process_group_ranks(self._group)
            hosts = world.host_of[ranks].tolist()
            machines = self.all_gather_object(socket.gethostname())
            if self.rank == 0 and (torn := Topology.torn(hosts, machines, ranks)):
                tell(
                    f"seqshard: {HOSTS}={os.environ[HOSTS]} puts {torn} on several hosts. It lists "
                    "the world's ranks host by host; number them so, as torchrun does"
                )
            return self._of_hosts(hosts)
        # Ranks on CPUs exchange nothing here unless torchrun says that there are several hosts.
        local, every = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if not self.compares if local is None else local != every:
            device = None if self._patience is None else self._patience.device
            return self._of_hosts(names_of_hosts(self.all_gather_object(host_here(device))))
        return None

    def _of_hosts(self, hosts: Sequence[Hashable]) -> Topology | None:
        """The topology of ranks on these hosts. Where hosts take turns: None, with a warning."""
        ranks = dist.get_process_group_ranks(self._group)
        if self.rank == 0 and (turns := Topology.interleaved(hosts, ranks)):
            tell(
                "seqshard: attention over this group is planned as if all links were alike, so "
                f"keys cross between hosts more than once: its hosts take turns ({turns}). Number "
                "the ranks host by host, as torchrun does"
            )
        return Topology.of(hosts)

    def check_device(self) -> None:
        if self._stamps is not None:
            self._stamps.check(self.now)

    def begin(self, call: int) -> None:
        super().begin(call)
        self.meet(call)
        if self._stamps is not None:
            self._stamps.begin(call, self.now)

    def end(self) -> None:
        if self._stamps is not None:
            self._stamps.end()

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        every = [message for side in (send, receive) for each in side.values() for message in each]
        on_cpu = bool(every) and every[0].is_cpu  # a group may have a backend for each device
        stamped: list[int] = []  # peers that send a stamp
        if self._stamps is not None and not on_cpu:
            send, receive, stamped = self._stamps.add_to(send, receive)
        try:
            ways = self._of_cpus if on_cpu else self._of_gpus
            works = [work for way in ways for work in self._begin(way, send, receive)]
        except RuntimeError as error:  # a connection that is closed already
            if self._patience is None or not on_cpu:
                raise
            self._patience.fail(self.now, error)

        def wait() -> None:
            for work in works:
                work.wait()

        # The buffers live until the messages have left.
        wait.buffers = (send, receive)  # type: ignore[attr-defined]
        if self._stamps is not None and stamped:
            return self._stamps.comparing(wait, stamped)
        return partial(self._wait, wait) if works and on_cpu else wait

    def _begin(self, way: Way, send: Messages, receive: Messages) -> list[dist.Work]:
        """Pass the messages that go this way. (``dist.batch_isend_irecv`` does the same in more of
        the host's time: ``examples/benchmark/parts/message_time.py``.)"""
        after = lambda peer: (peer - self.rank) % self.size  # noqa: E731
        # Sends in rank order from the next peer on, so that no rank is everybody's first target.
        ops = [
            (operation, message, peer - way.first)
            for operation, messages in ((way.group.send, send), (way.group.recv, receive))
            for peer in sorted(messages.keys() & way.peers, key=after)
            for message in messages[peer]
        ]
        if not ops:
            return []
        device = ops[0][1].device
        together = device.type != "cpu" and way.group._get_backend(device).supports_coalescing
        if together:
            way.group._start_coalescing(device)
        works = [operation([message], place, TAG) for operation, message, place in ops]
        return [way.group._end_coalescing(device)] if together else works

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self.meet()
        self._wait(partial(dist.all_gather_object, values, value, group=self._group))
        return values

    @contextmanager
    def beside(self) -> Iterator[Comm]:
        ranks = tuple(dist.get_process_group_ranks(self._group))
        group = another_group(ranks, backend="gloo")
        try:
            yield DistComm(group)
        finally:
            dist.destroy_process_group(group)

    def tell_failure(self, error: BaseException) -> None:
        if self._stamps is not None:
            self._stamps.fail()
        if self._patience is not None:
            self._patience.tell_failure(self.now, self.step, error)

    def is_first(self, what: str) -> bool:
        return self._patience is None or self._patience.is_first(what)

    def _wait(self, function: Callable[[], None]) -> None:
        """``function()``, which waits for peers."""
        if self._patience is None:
            function()
        else:
            self._patience.wait(self.now, function)

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        self.meet()
        dense = tensor.contiguous()
        op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        reduce = partial(dist.all_reduce, dense, op=op, group=self._group)
        if dense.is_cpu:
            self._wait(reduce)
        else:
            reduce()
        if dense is not tensor:
            tensor.copy_(dense)


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """End messages that are on their way; the groups are of no use after that."""
    for group in groups:
        with suppress(RuntimeError):  # the other groups are to end, too
            group.abort()
