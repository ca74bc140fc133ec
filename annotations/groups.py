"""Process groups from their global ranks, made on first use.

In a graph a group is its name, because ops take only tensors, numbers and strings.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group

from .after_import import constant_when_compiled


class GroupError(ValueError):
    """A ``process_group`` that cannot be used by this rank."""


_by_ranks: dict[tuple[int, ...], Any] = {}
_times_made: dict[tuple[int, ...], int] = {}


@constant_when_compiled  # torch.compile cannot trace how groups are made
def name_of_ranks(ranks: Sequence[int]) -> str:
    """The name of the group of these global ranks; ``""`` for a single one.

    The group is made on first use. Only its members need to call this, in any order.

    Args:
        ranks: in increasing order.
    Raises:
        GroupError: not global ranks in increasing order, or this rank is not one of them.
    """
    if isinstance(ranks, int) and ranks == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(_not_a_member())
    ranks = _checked(ranks)
    if dist.is_initialized() and dist.get_rank() not in ranks:
        raise GroupError(f"global rank {dist.get_rank()} is not in process_group={ranks}")
    if dist.is_initialized() and ranks[-1] >= dist.get_world_size():
        raise GroupError(f"process_group={ranks}, but the world has {dist.get_world_size()} ranks")
    return group_of_ranks(ranks).group_name if len(ranks) > 1 else ""


def group_named(name: str) -> Any:
    """The process group of a name.

    Raises:
        GroupError: no group has this name.
    """
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        raise GroupError(f"no process group is named {name!r}") from None


def _not_a_member() -> str:
    """What is wrong where ``dist.new_group`` returned a number, as it does on ranks that the group
    leaves out. The number is the same for all groups; torch knows the ranks of the last one."""
    here, last = "this rank", "; it was made for other ranks"
    if dist.is_initialized():
        here = f"global rank {dist.get_rank()}"
        members = distributed_c10d._world.pg_group_ranks.get(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[call-overload]
        if members:
            last = f"; the last group made without this rank has global ranks {tuple(members)}"
    return (
        f"{here} is not a member of process_group, which is GroupMember.NON_GROUP_MEMBER "
        f"({dist.GroupMember.NON_GROUP_MEMBER}) as dist.new_group returns it on ranks that it was "
        f"not given{last}. Call this on members alone, or pass a group, or global ranks in "
        "increasing order, with this rank in it"
    )


def _checked(ranks: object) -> tuple[int, ...]:
    try:
        ranks = tuple(int(rank) for rank in ranks)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise GroupError(
            "process_group must be a torch.distributed.ProcessGroup, a sequence of global ranks, "
            f"or None, got {ranks!r}"
        ) from None
    if not ranks or any(a >= b for a, b in itertools.pairwise(ranks)):
        raise GroupError(f"process_group must list global ranks in increasing order, got {ranks}")
    return ranks


def group_of_ranks(ranks: tuple[int, ...]) -> Any:
    """The process group of these global ranks, which include this one; made on first use.

    Raises:
        GroupError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise GroupError(f"process_group={ranks}, but torch.distributed is not initialised")
    known = _by_ranks.get(ranks)
    if known is None or not _is_alive(known):
        if ranks == tuple(range(dist.get_world_size())):
            known = dist.group.WORLD
        else:
            known = another_group(ranks)
        _by_ranks[ranks] = known
    return known


def forget_groups() -> None:
    """Keep no group any longer that was made for its ranks."""
    _by_ranks.clear()


def another_group(ranks: tuple[int, ...], options: Any = None, backend: str | None = None) -> Any:
    """A new group of these global ranks, which all of them make together.

    Args:
        options: of NCCL, as ``dist.ProcessGroupNCCL.Options``; NCCL is then its backend.
        backend: if it is not to be the world's.
    """
    chosen: dict[str, Any] = {} if backend is None else {"backend": backend}
    if options is not None:
        chosen = {"backend": "nccl", "pg_options": options}
    with _name_from(ranks), _not_split():
        return dist.new_group(list(ranks), use_local_synchronization=True, **chosen)


@contextmanager
def _name_from(ranks: tuple[int, ...]) -> Iterator[None]:
    """Make torch name the next group after ``ranks`` alone.

    The members of a group find each other by its name, and torch puts into it the number of groups
    that the rank has made before. Ranks with different numbers, say 0 and 2 after 1 and 2 have made
    a group, would wait for each other forever.
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


@contextmanager
def _not_split() -> Iterator[None]:
    """Make torch connect the next group separately.

    If the world is bound to a device, torch splits new NCCL groups off the world's communicator,
    and waits until all ranks take part.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return _resolve_process_group(group.group_name) is group
    except (RuntimeError, ValueError):
        return False


def timeout_of(group: dist.ProcessGroup, device: torch.device | None) -> float:
    """The timeout of a group, in seconds. For GPUs it is the world's, if that is longer than what a
    group is made with by default; gloo keeps to the group's own."""
    groups = (group,) if device is None else (group, dist.group.WORLD)
    timeouts: list[timedelta] = []
    for each in groups:
        with suppress(RuntimeError, AttributeError):  # none for the device, or one without
            backend = each._get_backend(device or torch.device("cpu"))  # type: ignore[union-attr]
            timeouts.append(backend.options._timeout)
    return max(timeouts, default=dist.default_pg_timeout).total_seconds()
