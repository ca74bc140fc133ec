"""Which ranks write into one another's memory, and what all of them are told where they cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.dist_comm import DistComm
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, run_ranks
from customized_ops.ring_attention.core.comm.one_sided import symmetric
from customized_ops.ring_attention.core.comm.one_sided.symmetric import CHOICE, comm_over

RANKS = 3


class Machine:
    """What ranks that are threads see of a machine with a GPU each.

    Attributes:
        hosts, gpus: of each rank. visible: GPUs that a process sees. apart: pairs of GPUs that do
            not reach each other. broken: ranks that cannot have symmetric memory.
        made: ranks that tried to. connected: those that are about to send messages between GPUs.
    """

    def __init__(self) -> None:
        self.backend = "cpu:gloo,cuda:nccl"
        self.hosts, self.gpus = ["here"] * RANKS, list(range(RANKS))
        self.visible = RANKS
        self.apart: set[tuple[int, int]] = set()
        self.broken: set[int] = set()
        self.made: list[int] = []
        self.connected: list[int] = []
        self._thread = threading.local()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for torch and the operating system."""
        patch.setattr(symmetric, "DistComm", lambda comm, hosts: comm)
        patch.setattr(symmetric, "SymmetricComm", self._symmetric)
        connect = lambda comm, device: self.connected.append(comm.rank)  # noqa: E731
        patch.setattr(InProcessComm, "connect", connect, raising=False)
        patch.setattr(InProcessComm, "first_problem", DistComm.first_problem, raising=False)
        patch.setattr(dist, "get_backend_config", lambda comm: self.backend)
        patch.setattr(symmetric.socket, "gethostname", lambda: self.hosts[self._thread.rank])
        patch.setattr(torch.cuda, "current_device", lambda: self.gpus[self._thread.rank])
        patch.setattr(torch.cuda, "device_count", lambda: self.visible)
        patch.setattr(torch.cuda, "get_device_properties", self._properties)
        patch.setattr(
            torch.cuda, "can_device_access_peer", lambda a, b: not {(a, b), (b, a)} & self.apart
        )

    def connect(self) -> list[str]:
        """How each rank is connected, or what its error says."""

        def body(comm: Comm) -> str:
            self._thread.rank = comm.rank
            try:
                return "messages" if comm_over(comm) is comm else "symmetric"  # type: ignore[arg-type]
            except (RuntimeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"

        return run_ranks(RANKS, body)

    def _symmetric(self, comm: Comm, device: torch.device, hosts: None) -> object:
        assert device == torch.device("cuda", self.gpus[comm.rank])
        self.made.append(comm.rank)
        if comm.rank in self.broken:
            raise RuntimeError(f"no memory on rank {comm.rank}")
        return object()

    @staticmethod
    def _properties(device: torch.device | int) -> Any:
        index = device if isinstance(device, int) else device.index
        return SimpleNamespace(uuid=f"GPU-{index}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One host whose GPUs reach each other; nothing is chosen."""
    machine = Machine()
    machine.install(monkeypatch)
    monkeypatch.delenv(CHOICE, raising=False)
    return machine


@pytest.mark.parametrize("choice", [None, "auto", "symmetric"])
def test_ranks_that_reach_each_other(
    machine: Machine, choice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice is not None:
        monkeypatch.setenv(CHOICE, choice)
    assert machine.connect() == ["symmetric"] * RANKS
    assert sorted(machine.made) == list(range(RANKS))


def test_messages_alone_if_chosen(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "nccl")
    assert machine.connect() == ["messages"] * RANKS
    assert machine.made == []
    assert sorted(machine.connected) == list(range(RANKS))


@pytest.mark.parametrize("choice", ["", "NCCL", "nvshmem"])
def test_an_unknown_choice(machine: Machine, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, choice)
    message = f"ValueError: SEQSHARD_COMM must be auto, nccl or symmetric, got {choice!r}"
    assert machine.connect() == [message] * RANKS
    assert machine.made == []


@pytest.mark.parametrize("choice", ["auto", "symmetric"])
def test_a_group_of_cpus_sends_messages(
    machine: Machine, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE, choice)
    machine.backend = "cpu:gloo,cuda:gloo"
    assert machine.connect() == ["messages"] * RANKS
    assert machine.made == []


def several_hosts(machine: Machine) -> None:
    """Their GPUs are of the same number there."""
    machine.hosts, machine.gpus = ["here", "there", "here"], [0, 0, 1]


def one_gpu_for_two(machine: Machine) -> None:
    machine.gpus = [0, 1, 1]


def out_of_reach(machine: Machine) -> None:
    """Ranks 0 and 2 see it, rank 1 does not."""
    machine.apart = {(0, 2)}


def broken_on_one(machine: Machine) -> None:
    machine.broken = {1}


@pytest.mark.parametrize(
    ("happens", "problem", "made"),
    [
        (several_hosts, "the ranks are on several hosts", []),
        (one_gpu_for_two, "several ranks share a GPU", []),
        (out_of_reach, "GPU 0 cannot reach GPU 2", []),
        (broken_on_one, "symmetric memory: no memory on rank 1", [0, 1, 2]),
    ],
)
def test_all_ranks_send_messages_if_one_cannot(
    machine: Machine,
    happens: Callable[[Machine], None],
    problem: str,
    made: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happens(machine)
    assert machine.connect() == ["messages"] * RANKS
    assert sorted(machine.made) == made
    monkeypatch.setenv(CHOICE, "symmetric")
    message = f"RuntimeError: SEQSHARD_COMM=symmetric, but {problem}"
    assert machine.connect() == [message] * RANKS


def test_gpus_that_a_process_does_not_see(machine: Machine) -> None:
    """Only making the memory tells."""
    machine.visible, machine.gpus = 0, [3, 4, 5]
    machine.apart = {(a, b) for a in range(6) for b in range(a)}
    assert machine.connect() == ["symmetric"] * RANKS
    machine.broken = {0}
    assert machine.connect() == ["messages"] * RANKS
