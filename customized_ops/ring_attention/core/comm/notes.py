"""What the ranks of a group write for each other in its store.

While all goes well, a rank writes the name of its process at the start, and that it is done at the
end. Notes are never deleted, because reading a key that is deleted meanwhile would block. An empty
note stands for none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .links.host_names import name_of
from .signals.fingerprint import Meeting

# Kinds of notes; those of waits depend on who waits.
PROCESS, FAILED, LEFT, ASKED = "process", "failed", "left", "asked"
WAITS = {"host": "waits", "gpu": "gpu waits"}

Passes = Mapping[int, int]  # number of a pass, counted alike by all ranks -> its fingerprint
# Number of a meeting, counted alike by all ranks -> what this rank was doing when all met, and the
# fingerprint if that was a pass.
Meetings = Mapping[int, Meeting]


class Notes:
    """The notes of one rank, which also reads those of its peers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = _get_process_group_store(group)
        self.rank, self.ranks = group.rank(), dist.get_process_group_ranks(group)
        self.peers = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        for what in (FAILED, LEFT, *WAITS.values()):  # of an earlier group of the same name
            self.write(what, "")
        self.write(PROCESS, name_of(os.getpid()))

    def write(self, what: str, text: str) -> None:
        """Write a note. Does nothing where the store is gone with the rank that keeps it."""
        with suppress(RuntimeError):
            self._store.set(f"{what}/{self.rank}", text)

    def written(self, what: str) -> dict[int, str]:
        """Peers' notes of this kind, by rank. Raises RuntimeError where the store is gone."""
        keys = {rank: f"{what}/{rank}" for rank in self.peers}
        found = {r: self._store.get(k).decode() for r, k in keys.items() if self._store.check([k])}
        return {rank: text for rank, text in found.items() if text}

    def waits(self) -> list[tuple[int, tuple[str, Passes, Meetings]]]:
        """What peers that have waited for long wait in; nothing where the store is gone."""
        with suppress(RuntimeError):
            written = [item for of in WAITS.values() for item in self.written(of).items()]
            return [(rank, _read_waits(text)) for rank, text in written]
        return []

    def is_first(self, what: str) -> bool:
        """Whether no rank has asked for this before; True where the store is gone."""
        with suppress(RuntimeError):
            return bool(self._store.add(f"{ASKED}/{what}", 1) == 1)
        return True


def waits_text(doing: str, passes: Passes, meetings: Meetings = MappingProxyType({})) -> str:
    """The note of a rank that has waited for long. Its host waits in the last of its meetings."""
    return json.dumps([doing, list(passes.items()), list(meetings.items())[-1:]])


def _read_waits(text: str) -> tuple[str, Passes, Meetings]:
    doing, passes, meeting = json.loads(text)
    return doing, dict(passes), {number: Meeting(*met) for number, met in meeting}
