"""Processes of a host, as they call themselves to one another, and whether they have ended."""

from __future__ import annotations

import os
from pathlib import Path

KERNEL = Path("/proc/sys/kernel/random/boot_id")  # another one on each host, and after each start


def name_of(number: int) -> str:
    """What the process with that number here is called by processes of all hosts; "" where there is
    none, or the system does not say."""
    try:
        return f"{number} {_started(number)} {_system()}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether the process called that is one of this host's (and of this container's), and has."""
    number, _, rest = process.partition(" ")
    started, _, system = rest.partition(" ")
    try:
        if system != _system():
            return False
    except OSError:
        return False
    try:
        return _started(int(number)) != started
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # as if too many files are open
        return False


def _started(number: int) -> str:
    """When the process with that number started, which another with the same number did not.

    Raises:
        ProcessLookupError: there is none, or it has ended and is kept until its parent has asked.
    """
    _, _, said = Path(f"/proc/{number}/stat").read_text().rpartition(")")
    fields = said.split()
    if fields[0] in "ZX":
        raise ProcessLookupError(number)
    return fields[19]


def _system() -> str:
    """The kernel that is running, and the namespace of processes that this one is of."""
    return f"{KERNEL.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
