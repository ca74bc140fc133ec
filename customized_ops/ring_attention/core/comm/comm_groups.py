"""From what users pass as ``process_group`` to a :class:`~.comm.Comm`, and from its name back."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from annotations.groups import name_of_ranks

from . import fake_comm, inprocess
from .dist_comm import DistComm
from .fake_comm import FakeComm
from .messages import Comm
from .symmetric import comm_over

GroupLike = dist.ProcessGroup | Sequence[int] | Comm | None


ALONE = FakeComm(0, 1)  # a group of one rank

_by_name: dict[str, tuple[dist.ProcessGroup, DistComm]] = {}


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


def comm_by_name(name: str) -> Comm:
    """The Comm of a group, on this rank; ``""`` is a single rank."""
    if name == "":
        return ALONE
    if name.startswith("inprocess:"):
        return inprocess.this_thread(name)
    if name.startswith("fake:"):
        return fake_comm.by_name(name)
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    # A destroyed world may leave its names to the next one, so the group itself is compared.
    if name not in _by_name or _by_name[name][0] is not group:
        _by_name[name] = (group, comm_over(group))
    return _by_name[name][1]


def group_comm(process_group: GroupLike) -> Comm:
    """The Comm of what users pass as ``process_group``; see :func:`group_name`."""
    return comm_by_name(group_name(process_group))
