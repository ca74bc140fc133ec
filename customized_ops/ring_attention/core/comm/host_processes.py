"""Processes of a host: which of a group's ranks are here, and whether they have ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def processes_of(peers: Sequence[tuple[int, int] | None]) -> dict[int, int]:
    """Of what ranks say of themselves by :func:`this_process`, the ids of processes whose end this
    one can see."""
    here = this_process()
    if here is None:
        return {}
    same = {rank: each[0] for rank, each in enumerate(peers) if each and each[1] == here[1]}
    return {rank: process for rank, process in same.items() if not has_ended(process)}


def this_process() -> tuple[int, int] | None:
    """Its id, and the namespace of processes that this is one of; None where that is not known."""
    try:
        return os.getpid(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def has_ended(process: int) -> bool:
    try:
        _, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return True
    return rest.split()[0] in "ZX"  # it is kept until its parent has asked for it
