"""What ranks call their hosts and processes, told to ranks of all hosts."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

KERNEL = Path("/proc/sys/kernel/random/boot_id")  # another one on each host, and after each start


class Host(NamedTuple):
    """Where a rank is.

    Attributes:
        name: of the host. system: of its kernel, "" where the system does not say.
        network: of NVLink, which may span hosts, as in a rack of 72 GPUs; "" if its GPU has none.
    """

    name: str
    system: str
    network: str


def host_here(device: torch.device | None) -> Host:
    """That of this process, whose GPU is ``device``."""
    system = ""
    with suppress(OSError):
        system = KERNEL.read_text().strip()
    return Host(socket.gethostname(), system, "" if device is None else _nvlink_network(device))


def names_of_hosts(hosts: Sequence[Host]) -> list[str]:
    """What each rank's host is called, by all ranks alike: the same where ranks have links inside a
    host, or an NVLink network, to one another. Networks and kernels count only where all ranks have
    one; containers with names of their own are hosts."""
    if all(host.network for host in hosts):
        return [host.network for host in hosts]
    of_name = {host.name: {h.system for h in hosts if h.name == host.name} for host in hosts}
    known = all(host.system for host in hosts)
    return [
        f"{h.name} ({h.system})" if known and len(of_name[h.name]) > 1 else h.name for h in hosts
    ]


def _nvlink_network(device: torch.device) -> str:
    """By NVML, where its package, nvidia-ml-py, is installed."""
    with suppress(Exception):  # it has errors of its own for all that it lacks
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        found = nvml.c_nvmlGpuFabricInfoV_t()
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(found))
        network = bytes(found.clusterUuid)
        if found.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(network):
            return f"NVLink network {network.hex()}, clique {found.cliqueId}"
    return ""


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
