"""Ranks of one host that write into one another's GPU memory over NVLink, by torch's symmetric
memory. NVLink's multicast is not used."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from annotations.groups import group_of_ranks

from ...plan.cost_model import H200
from ...topology import Topology
from ..dist_comm import COSTS, DistComm
from ..links.kept_links import kept_or_probed, require_choice
from ..links.link_probe import LARGE, Links, written
from ..patience import Patience
from ..signals.flags import CHANNELS, FLAG_BYTES, Flags, flags_bytes
from ..signals.watch import Watch, require_alike, require_room
from .arena import Piece
from .one_sided_comm import OneSidedComm

CHOICE = "SEQSHARD_COMM"  # the environment variable that chooses the kind of Comm


class SymmetricMemory:
    """See :class:`~.arena.Memory`.

    To make such memory, ranks exchange messages. Up to torch 2.13 a process numbers them with one
    count for all its groups (pytorch/pytorch#196082), so a rank that was in other groups before
    would wait for ever for keys that its peers never write. Hence ranks compare how often they have
    made such memory. Those that are behind make some for themselves alone until they catch up.
    """

    # How often this class has made symmetric memory in this process, for any group; memory that
    # other code makes is not counted.
    made = 0

    channels = CHANNELS

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.patience = Patience(group, device)
        n_bytes = flags_bytes(group.size())
        handle, self._flags_memory = self._rendezvous(n_bytes)
        words = (n_bytes // FLAG_BYTES,)
        of_ranks = [handle.get_buffer(n, words, torch.int64) for n in range(group.size())]
        self._handle, self._flags = handle, Flags(of_ranks, group.rank(), device)
        self._watch = Watch(self.patience, self._flags.record)

    def _rendezvous(self, n_bytes: int) -> tuple[Any, Tensor]:
        """A handle on new memory of all ranks, and the rank's own memory, which must be kept."""
        failure, text = None, ""
        try:
            memory = self._new(n_bytes)
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            failure, text = error, f"{type(error).__name__}: {error}"
        said: list[Any] = [None] * self._group.size()
        mine = SymmetricMemory.made, n_bytes, text
        self._wait(partial(dist.all_gather_object, said, mine, group=self._group))
        times, sizes, failures = zip(*said, strict=True)
        if failure is not None:
            raise failure
        require_alike(sizes)
        require_room(failures)
        for _ in range(max(times) - SymmetricMemory.made):
            self._share(self._new(FLAG_BYTES), group_of_ranks((dist.get_rank(),)))
        return self._share(memory, self._group), memory

    def _new(self, n_bytes: int) -> Tensor:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(n_bytes, dtype=torch.uint8, device=self._device)
        memory.zero_()
        torch.cuda.synchronize(self._device)  # before a peer gets hold of it
        return memory

    @staticmethod
    def _share(memory: Tensor, group: dist.ProcessGroup) -> Any:
        from torch.distributed import _symmetric_memory as symmetric

        SymmetricMemory.made += 1
        return symmetric.rendezvous(memory, group.group_name)

    def allocate(self, n_bytes: int) -> Piece:
        if self.capturing():
            raise RuntimeError(
                "seqshard: buffers for what ranks exchange must be made before a CUDA graph is "
                "captured; run the step once as it is first"
            )
        torch.cuda.synchronize(self._device)
        self._wait(partial(dist.barrier, self._group, device_ids=[self._device.index]))
        handle, memory = self._rendezvous(n_bytes)
        ranks = range(self._group.size())
        buffers = [handle.get_buffer(rank, (n_bytes,), torch.uint8) for rank in ranks]
        return Piece(buffers, (handle, memory))

    def _wait(self, function: Callable[[], None]) -> None:
        """``function()``, which waits for peers."""
        self.patience.wait("where memory for exchanges is made", function)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def name(self, call: int, what: str) -> None:
        self._watch.name(call, what)

    def check(self, what: str) -> None:
        self._watch.check(what)

    def signal(self, peers: Sequence[int], channel: int, call: int) -> None:
        self._flags.put(peers, channel, call)

    def wait(self, peers: Sequence[int], channel: int, call: int) -> None:
        self._flags.wait(peers, channel, call)


class SymmetricComm(OneSidedComm, DistComm):
    """A Comm over symmetric memory, and over NCCL for exchanges that have no place in it."""

    _introduced = False  # whether NCCL has connected the ranks, for which all must be there

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, hosts: Topology | None = None
    ) -> None:
        memory = SymmetricMemory(group, device)
        super().__init__(memory, group, hosts)
        self._patience = memory.patience
        self._name_meetings()

        def probe() -> Links:
            piece = memory.allocate(LARGE)
            return written(self, piece.of_ranks, H200, device)

        given = (self.size,), device, "symmetric memory", probe
        links, self.links_from = kept_or_probed(self, *given)
        self.costs = links.in_place_of(H200).with_rates(os.environ.get(COSTS, ""), COSTS)

    def expect_messages(self) -> None:
        if not self._introduced:
            for way in self._of_gpus:
                way.introduce(self.rank, torch.device("cuda", torch.cuda.current_device()))
            self._introduced = True


def comm_over(group: dist.ProcessGroup, hosts: Topology | None = None) -> DistComm:
    """The fastest Comm for a group: all of its ranks call this together. For ``hosts`` see
    :class:`.DistComm`.

    ``SEQSHARD_COMM`` may be "nccl", for messages alone, or "symmetric", to fail (RuntimeError)
    where a group of GPUs has no symmetric memory. Groups of CPUs send messages in any case.

    Raises:
        ValueError: ``SEQSHARD_COMM`` or ``SEQSHARD_LINKS`` has another value.
    """
    choice = os.environ.get(CHOICE, "auto")
    if choice not in ("auto", "nccl", "symmetric"):
        raise ValueError(f"{CHOICE} must be auto, nccl or symmetric, got {choice!r}")
    require_choice()
    messages = DistComm(group, hosts)
    if "nccl" not in str(dist.get_backend_config(group)):
        return messages
    device = torch.device("cuda", torch.cuda.current_device())
    if choice == "nccl":
        messages.connect(device)
        return messages
    comm: DistComm = messages
    problem = messages.first_problem(_unreachable(messages, device))
    if problem is None:  # the same on every rank, so all of them go on
        failure = None
        try:
            comm = SymmetricComm(group, device, hosts)
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            failure = f"symmetric memory: {error}"
        problem = messages.first_problem(failure)
    if problem is not None and choice == "symmetric":
        raise RuntimeError(f"{CHOICE}=symmetric, but {problem}")
    if problem is not None:
        messages.connect(device)
    return comm if problem is None else messages


def _unreachable(comm: DistComm, device: torch.device) -> str | None:
    """Why this rank cannot write into the memory of its peers, or None."""
    here = torch.cuda.get_device_properties(device).uuid
    gpus = range(torch.cuda.device_count())
    visible = {str(torch.cuda.get_device_properties(n).uuid): n for n in gpus}
    if comm.costs.topology is not None:
        return "the ranks are on several hosts"
    places = comm.all_gather_object((socket.gethostname(), str(here)))
    if len({host for host, _ in places}) > 1:  # hosts may take turns, too
        return "the ranks are on several hosts"
    if len(set(places)) < len(places):
        return "several ranks share a GPU"
    for _, uuid in places:
        # A GPU that this process does not see is taken to be in reach. If it is not, making the
        # memory fails.
        there = visible.get(uuid, device.index)
        if there != device.index and not torch.cuda.can_device_access_peer(device.index, there):
            return f"GPU {device.index} cannot reach GPU {there}"
    return None
