"""Messages over a torch process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

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
from .signals.flags import MOST_RANKS
from .signals.stamps import Stamps
from .ways.way import Way, abort, start, ways_apart

HOSTS = "SEQSHARD_HOSTS"  # an environment variable: which ranks of the world share a host
COSTS = "SEQSHARD_COSTS"  # an environment variable: rates of the CostModel
GATHERED = 1 / 8  # the part of a GPU's memory that a pass may fill with keys of other ranks


class DistComm(Comm):
    """A Comm over a torch process group, by point-to-point messages of gloo or NCCL.

    Args:
        hosts: of its ranks; None: those that ``SEQSHARD_HOSTS`` gives, or that are found.
    """

    links_from = ""  # from where the speed of its links is known; "": it was not measured

    def __init__(self, group: dist.ProcessGroup, hosts: Topology | None = None) -> None:
        super().__init__(group.group_name, group.rank(), group.size())
        self._group, self._hosts = group, hosts
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
        self._of_gpus = self.ways_apart(_options)
        self._stamps = self._made_stamps(device, partial(abort, self._of_gpus))
        for way in self._of_gpus:
            way.introduce(self.rank, device)
        hosts, backend = hosts_of(self, self.costs), str(dist.get_backend_config(self._group))
        probe = partial(probed, self, hosts, device)
        links, self.links_from = kept_or_probed(self, hosts, device, backend, probe)
        memory = min(self.all_gather_object(torch.cuda.get_device_properties(device).total_memory))
        self.costs = replace(links.in_place_of(self.costs), gathered_bytes=memory * GATHERED)
        self.costs = self.costs.with_rates(os.environ.get(COSTS, ""), COSTS)
        if self._stamps is not None:  # else only torch would notice that a message never comes
            self._of_gpus = [way.direct(device) for way in self._of_gpus]

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
        if (problem := self.first_problem(problem)) is not None:
            stamps = None
        elif self.size > MOST_RANKS:
            problem = f"{self.size} ranks; flags are for {MOST_RANKS}"
        if problem is not None:
            group = f"the group {self.name!r}"
            tell(f"seqshard: GPUs of {group} do not compare their passes: {problem}")
        return stamps

    def ways_apart(self, options: Callable[[], Any] = lambda: None) -> list[Way]:
        """New groups for its messages; see :func:`.ways_apart`. All ranks call this together."""
        ranks = dist.get_process_group_ranks(self._group)
        return ways_apart(ranks, self.rank, self.costs.topology, options)

    def _topology(self) -> Topology | None:
        """The hosts of the group; None: one. ``SEQSHARD_HOSTS`` gives the hosts of the whole world,
        in a form that :meth:`.Topology.parse` reads. Without it, ranks on CPUs are on one host
        unless torchrun says that there are several.

        Raises:
            ValueError: hosts are given of more ranks than there are, or fewer; or ranks are given
                different ones.
        """
        given, device = self._hosts, None if self._patience is None else self._patience.device
        text = os.environ.get(HOSTS, "")
        said = f"{HOSTS}={text}" if text and given is None else f"hosts={given}"
        told, here = zip(*self.all_gather_object((said, host_here(device))), strict=True)
        ranks = dist.get_process_group_ranks(self._group)
        if len(set(told)) > 1:
            firsts = ", ".join(
                f"rank {ranks[told.index(each)]}: {each}" for each in sorted({*told})
            )
            raise ValueError(
                f"the ranks of the group {self.name!r} are given different hosts ({firsts})"
            )
        if text or given is not None:
            known = given or Topology.parse(text, HOSTS)
            size = self.size if given else dist.get_world_size()
            if known.size != size:
                raise ValueError(f"{said} has {known.size} ranks, there are {size}")
            hosts = (known.host_of if given else known.host_of[ranks]).tolist()
            machines = [host.name for host in here]
            if self.rank == 0 and (torn := Topology.torn(hosts, machines, ranks)):
                tell(
                    f"seqshard: {said} puts {torn} on several hosts. It lists the ranks host by "
                    "host; number them so, as torchrun does"
                )
            return self._of_hosts(hosts)
        local, every = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        if not self.compares if local is None else local != every:
            return self._of_hosts(names_of_hosts(here))
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
        for way in self._of_gpus:
            way.forget()
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
            works = start(ways, self.rank, send, receive)
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
            yield DistComm(group, self._hosts)
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


def _options() -> dist.ProcessGroupNCCL.Options:
    """Of groups that carry messages between GPUs: their kernels start first, and whoever calls NCCL
    waits until it has what it was told."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.blocking = 1
    return options
