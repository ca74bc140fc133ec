"""Hosts and NVLink networks, as ranks call them."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.comm.links.host_names import Host, host_here, names_of_hosts

A, B = Host("a", "1", ""), Host("b", "2", "")
RACK, OTHER = A._replace(network="x"), B._replace(network="y")


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([A, A, B], ["a", "a", "b"]),
        ([A, A._replace(system="3")], ["a (1)", "a (3)"]),
        ([A, A._replace(system="")], ["a", "a"]),
        ([A, A._replace(name="container")], ["a", "container"]),
        ([RACK, B._replace(network="x"), OTHER], ["x", "x", "y"]),
        ([RACK, B], ["a", "b"]),  # they cannot tell whether b is in x
    ],
)
def test_names_are_those_of_fast_links(hosts: list[Host], names: list[str]) -> None:
    assert names_of_hosts(hosts) == names


class Fabric(ctypes.Structure):
    """What NVML fills in."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


def nvml(uuid: bytes, state: int) -> SimpleNamespace:
    def fill(gpu: str, given: Any) -> None:
        assert gpu == "GPU-7"
        found = given._obj
        found.clusterUuid[:], found.cliqueId, found.state = uuid, 5, state

    return SimpleNamespace(
        nvmlInit=lambda: None,
        c_nvmlGpuFabricInfoV_t=Fabric,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetGpuFabricInfoV=fill,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
    )


@pytest.mark.parametrize(
    ("library", "network"),
    [
        (nvml(bytes(range(16)), 3), f"NVLink network {bytes(range(16)).hex()}, clique 5"),
        (nvml(bytes(16), 3), ""),  # of a host alone
        (nvml(bytes(range(16)), 2), ""),  # not joined yet
        (SimpleNamespace(), ""),
        (None, ""),  # not installed
    ],
)
def test_an_nvlink_network_is_asked_for(
    library: Any, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=7))
    here = host_here(torch.device("cuda", 0))
    assert here.network == network and here.name and here.system
    assert host_here(None).network == ""
