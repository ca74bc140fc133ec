"""Jobs that make symmetric memory as torch does, but of a CPU's; see ``ranks.Pool``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group

from customized_ops.ring_attention.core.comm.one_sided.symmetric import SymmetricMemory

Told = list[str]


class Process:
    """What torch keeps of one process: how many exchanges it made, over all its groups."""

    exchanges = 0
    patience = timedelta()

    @classmethod
    def rendezvous(cls, memory: torch.Tensor, name: str) -> Told:
        """Two exchanges between the ranks of a group, through its store; what each rank told."""
        group = _resolve_process_group(name)  # type: ignore[arg-type]
        told: Told = []
        for _ in range(2):
            keys = [f"memory/{cls.exchanges}/{rank}" for rank in range(group.size())]
            cls.exchanges += 1
            store = group.get_group_store()
            store.set(keys[group.rank()], f"{dist.get_rank()}: {len(memory)} bytes")
            store.wait([key for n, key in enumerate(keys) if n != group.rank()], cls.patience)
            told = [store.get(key).decode() for key in keys]
        return told


def make(groups: Sequence[tuple[int, ...]], catch_up: bool, seconds: float) -> list[Told | str]:
    """In each group that this rank is in, one after the other, make memory; what ranks told each
    other, or what went wrong.

    Args:
        catch_up: False: as if all had made as much before. seconds: to wait for a rank.
    """
    told: list[Told | str] = []
    Process.patience = timedelta(seconds=seconds)
    fakes = {"empty": _empty, "rendezvous": Process.rendezvous}
    with (
        patch.multiple(_symmetric_memory, **fakes),
        patch.object(SymmetricMemory, "made", 0),
        patch.object(torch.cuda, "synchronize"),
    ):
        for n, ranks in enumerate(groups):
            group = dist.new_group(list(ranks))
            if dist.get_rank() not in ranks:
                continue
            memory: Any = SymmetricMemory.__new__(SymmetricMemory)
            memory._group, memory._device = group, torch.device("cpu")
            memory.patience = SimpleNamespace(wait=lambda what, function: function())
            if not catch_up:
                SymmetricMemory.made = 0
            try:
                told.append(memory._rendezvous(n + 1)[0])
            except RuntimeError as error:  # of a store that is a file
                told.append(str(error).splitlines()[0])
    Process.exchanges = 0
    return told


def without_room(poor: int) -> str:
    """What a rank is told where one has no room for its memory."""

    def empty(n_bytes: int, **_: Any) -> Any:
        if dist.get_rank() == poor:
            raise torch.OutOfMemoryError("20 GiB")
        return _empty(n_bytes)

    memory: Any = SymmetricMemory.__new__(SymmetricMemory)
    memory._group, memory._device = dist.group.WORLD, torch.device("cpu")
    memory.patience = SimpleNamespace(wait=lambda what, function: function())
    with patch.object(_symmetric_memory, "empty", empty), patch.object(torch.cuda, "synchronize"):
        try:
            return str(memory._rendezvous(8))
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"


def _empty(n_bytes: int, **_: Any) -> Any:
    return torch.empty(n_bytes, dtype=torch.uint8)
