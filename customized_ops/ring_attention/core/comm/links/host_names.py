"""Names of hosts and processes that ranks of all hosts understand alike."""

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

KERNEL = Path("/proc/sys/kernel/random/boot_id")  # differs between hosts, and after each boot


class Host(NamedTuple):
    """Where a rank is.

    Attributes:
        name: of the host. system: the name of its running kernel, "" where that is not known.
        network: that of NVLink, which may span hosts, as in a rack of 72 GPUs; "" if there is none.
    """

    name: str
    system: str
    network: str


def host_here(device: torch.device | None) -> Host:
    """The Host of this process, whose GPU is ``device``."""
    system = ""
    with suppress(OSError):
        system = KERNEL.read_text().strip()
    return Host(socket.gethostname(), system, "" if device is None else _nvlink_network(device))


def names_of_hosts(hosts: Sequence[Host]) -> list[str]:
    """The name of each rank's host, the same on all ranks. Two ranks have the same name here if the
    link between them is inside a host, or in an NVLink network. Networks and kernels are compared
    only where all ranks have one. A container with a name of its own is a host."""
    if all(host.network for host in hosts):
        return [host.network for host in hosts]
    of_name = {host.name: {h.system for h in hosts if h.name == host.name} for host in hosts}
    known = all(host.system for host in hosts)
    return [
        f"{h.name} ({h.system})" if known and len(of_name[h.name]) > 1 else h.name for h in hosts
    ]


def _nvlink_network(device: torch.device) -> str:
    """The GPU's NVLink network, by NVML where its package, nvidia-ml-py, is installed."""
    with suppress(Exception):  # NVML has errors of its own for all that it lacks
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
    """The name by which processes of all hosts know the process with this number here; "" where
    there is none, or the system does not say."""
    try:
        return f"{number} {_started(number)} {_system()}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether the process with this name is one of this host (and container), and has ended."""
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
    except OSError:  # for example, too many files are open
        return False


def _started(number: int) -> str:
    """When the process with this number started. It tells apart processes that had the same number.

    Raises:
        ProcessLookupError: there is none, or it has ended and its parent has not collected it yet.
    """
    _, _, said = Path(f"/proc/{number}/stat").read_text().rpartition(")")
    fields = said.split()
    if fields[0] in "ZX":
        raise ProcessLookupError(number)
    return fields[19]


def _system() -> str:
    """The running kernel, and the PID namespace of this process."""
    return f"{KERNEL.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
