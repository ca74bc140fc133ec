"""Finds the :class:`~.comm.Comm` of what users pass as ``process_group``, or of a group's name; and
has the Comm of a rank without peers."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from annotations.groups import forget_groups, name_of_ranks

from ..plan.cost_model import CostModel
from ..topology import Topology
from . import inprocess, waiting_thread
from .dist_comm import DistComm
from .messages import Comm
from .one_sided.symmetric import comm_over
from .rank_group import Messages, Reduction

GroupLike = dist.ProcessGroup | Sequence[int] | Comm | None


class FakeComm(Comm):
    """Rank ``rank`` of ``size`` without the others: nothing arrives, and receive buffers are never
    written. Plans, buffers and kernel calls are the real ones; results are meaningless, and moving
    bytes takes no time. With ``size`` 1 there are no peers, so everything is real."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(f"fake:{rank}:{size}" if size > 1 else "", rank, size)

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        return lambda: None

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """The values stay this rank's."""

    def all_gather_object(self, value: object) -> list[object]:
        return [value] * self.size


ALONE = FakeComm(0, 1)  # a group of one rank

_by_name: dict[str, tuple[dist.ProcessGroup, DistComm]] = {}


@atexit.register
def _let_go() -> None:
    """Free the groups of a program that has destroyed its world, so that gloo's threads end before
    Python does: one that lets go of a tensor after that aborts the process. Not after a wait that
    was given up, because gloo would still wait there."""
    if _by_name and not dist.is_initialized() and waiting_thread.finish():
        _by_name.clear()
        forget_groups()
        gc.collect()


def group_name(process_group: GroupLike) -> str:
    """The name under which ops know a group; ``""`` for no group or a group of one.

    Args:
        process_group: a ProcessGroup, the global ranks of one in increasing order (made on first
            use; only its members need to ask), an in-process Comm, or None.
    Raises:
        GroupError: not one of these, or this rank is not a member.
    """
    if process_group is None:
        return ""
    if isinstance(process_group, Comm):
        return process_group.name if process_group.size > 1 else ""
    if isinstance(process_group, dist.ProcessGroup):
        return process_group.group_name if process_group.size() > 1 else ""
    return name_of_ranks(process_group)


def comm_by_name(name: str, hosts: Topology | None = None) -> Comm:
    """The Comm of a group, on this rank; ``""`` is a single rank. ``hosts``: those of processes, if
    this is the group's first use; see :class:`.DistComm`."""
    if name == "":
        return ALONE
    if name.startswith("inprocess:"):
        return inprocess.this_thread(name)
    if name.startswith("fake:"):
        return fake_comm_by_name(name)
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    # The next world may reuse the names of a destroyed one, so the group itself is compared.
    if name not in _by_name or _by_name[name][0] is not group:
        _by_name[name] = (group, comm_over(group, hosts))
    return _by_name[name][1]


@lru_cache(maxsize=64)
def fake_comm_by_name(name: str) -> FakeComm:
    """The FakeComm called ``name``, the same at each call, because caches of calls depend on it."""
    _, rank, size = name.split(":")
    return FakeComm(int(rank), int(size))


def group_comm(process_group: GroupLike) -> Comm:
    """The Comm of what users pass as ``process_group``; see :func:`group_name`."""
    return comm_by_name(group_name(process_group))


def group_costs(process_group: GroupLike, hosts: Topology | str | None = None) -> CostModel:
    """The rates and the hosts by which attention over a group is planned, the same on every rank.
    Used to plan ahead, as ``packed_batches`` does.

    Every rank of the group calls this, at the same point of its program: at the group's first use
    ranks exchange which host they are on.

    Args:
        hosts: of the group's ranks, as ``8x4`` or ``4,4,2``, in place of those that are found or
            that ``SEQSHARD_HOSTS`` gives; at the group's first use.
    Raises:
        GroupError: not a group, or this rank is not a member.
        ValueError: there are no such hosts, they have other ranks than the group, or it is over
            others, as ranks of one process are over one.
        TypeError: ``hosts`` is neither text nor a Topology.
    """
    name = group_name(process_group)
    if isinstance(hosts, str):
        hosts = Topology.parse(hosts)
    if not isinstance(hosts, Topology | None):
        raise TypeError(f"hosts must be given as 8x4 or 4,4,2, or as a Topology, got {hosts!r}")
    comm = comm_by_name(name, hosts)
    known = comm.costs.topology or Topology((comm.size,))
    if hosts is not None and hosts.size != comm.size:
        raise ValueError(f"hosts={hosts} has {hosts.size} ranks, the group {comm.size}")
    if hosts not in (None, known) and not isinstance(comm, DistComm):
        raise ValueError(
            f"hosts={hosts}: the ranks of {name!r} are in one process, so on one host; processes "
            "under torchrun have those of SEQSHARD_HOSTS"
        )
    if hosts not in (None, known):
        raise ValueError(
            f"the group {name!r} is used over {known}; give hosts={hosts} before its first use, "
            "host by host"
        )
    return comm.costs
