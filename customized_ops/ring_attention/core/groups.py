"""From what a user passes as ``process_group`` to a :class:`~.comm.Comm`, and from its name back.

In a graph a group is its name, because ops take only tensors, numbers and strings.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group

from . import inprocess
from .comm import Comm, DistComm, Messages

GroupLike = dist.ProcessGroup | Sequence[int] | Comm | None


class GroupError(ValueError):
    """A ``process_group`` that cannot be used by this rank."""


class AloneComm(Comm):
    """One rank: nothing to send to nobody."""

    def __init__(self) -> None:
        super().__init__("", 0, 1)

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """See :meth:`Comm.start`."""
        assert not send and not receive, "a single rank has no peers"
        return lambda: None

    def all_gather_object(self, value: object) -> list[object]:
        """See :meth:`Comm.all_gather_object`."""
        return [value]


ALONE = AloneComm()

_by_name: dict[str, tuple[dist.ProcessGroup, DistComm]] = {}
_by_ranks: dict[tuple[int, ...], Any] = {}
_times_made: dict[tuple[int, ...], int] = {}


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
    ranks = _as_ranks(process_group)
    if dist.is_initialized() and dist.get_rank() not in ranks:
        raise GroupError(f"global rank {dist.get_rank()} is not in process_group={ranks}")
    if dist.is_initialized() and ranks[-1] >= dist.get_world_size():
        raise GroupError(f"process_group={ranks}, but the world has {dist.get_world_size()} ranks")
    return _group_of(ranks).group_name if len(ranks) > 1 else ""


def comm_by_name(name: str) -> Comm:
    """The Comm of a group, on this rank; ``""`` is a single rank."""
    if name == "":
        return ALONE
    if name.startswith("inprocess:"):
        return inprocess.this_thread(name)
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    # A destroyed world may leave its names to the next one, so the group itself is compared.
    if name not in _by_name or _by_name[name][0] is not group:
        _by_name[name] = (group, DistComm(group))
    return _by_name[name][1]


def _as_ranks(process_group: object) -> tuple[int, ...]:
    try:
        ranks = tuple(int(rank) for rank in process_group)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise GroupError(
            "process_group must be a torch.distributed.ProcessGroup, a sequence of global ranks, "
            f"or None, got {process_group!r}"
        ) from None
    if not ranks or any(a >= b for a, b in itertools.pairwise(ranks)):
        raise GroupError(f"process_group must list global ranks in increasing order, got {ranks}")
    return ranks


def _group_of(ranks: tuple[int, ...]) -> Any:
    if not dist.is_initialized():
        raise GroupError(f"process_group={ranks}, but torch.distributed is not initialised")
    known = _by_ranks.get(ranks)
    if known is None or not _is_alive(known):
        if ranks == tuple(range(dist.get_world_size())):
            known = dist.group.WORLD
        else:
            with _name_from(ranks):
                known = dist.new_group(list(ranks), use_local_synchronization=True)
        _by_ranks[ranks] = known
    return known


@contextmanager
def _name_from(ranks: tuple[int, ...]) -> Iterator[None]:
    """Make torch name the next group after ``ranks`` alone.

    The members of a group find each other by its name, and torch puts into it how many groups the
    rank has made before. Ranks that differ in that, say 0 and 2 after 1 and 2 have made a group,
    would wait for each other for ever.
    """
    number = _times_made[ranks] = _times_made.get(ranks, -1) + 1
    text = f"seqshard {ranks} {number}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return _resolve_process_group(group.group_name) is group
    except (RuntimeError, ValueError):
        return False
