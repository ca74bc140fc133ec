"""Rates of links that an earlier run measured, from a file."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.links import kept_links
from customized_ops.ring_attention.core.comm.links.kept_links import (
    LINKS,
    kept_or_probed,
    require_choice,
)
from customized_ops.ring_attention.core.comm.links.link_probe import Link, Links

FOUND = Links(Link(3.1e9, 1.7e-5), Link(2.3e8, 4.9e-5, 1.75))


class Machine:
    """Two hosts of two ranks whose links are FOUND where they are measured."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.probes = folder, [0] * 4
        self.hosts, self.backend = (2, 2), "nccl"

    def run(self) -> list[tuple[Links, str]]:
        cpu = torch.device("cpu")
        given = self.hosts, cpu, self.backend
        return run_ranks(4, lambda comm: kept_or_probed(comm, *given, partial(self.probe, comm)))

    def probe(self, comm: Comm) -> Links:
        self.probes[comm.rank] += 1
        return FOUND

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("seqshard/*"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(LINKS, raising=False)
    return Machine(tmp_path)


def test_links_are_measured_once(machine: Machine) -> None:
    """Bit for bit the same from the file, on every rank; none is measured then."""
    measured, kept = machine.run(), machine.run()
    assert machine.probes == [1] * 4
    assert [links for links, _ in measured + kept] == [FOUND] * 8
    (path,) = machine.files  # and nothing that was begun
    assert json.loads(path.read_text())["between"] == [2.3e8, 4.9e-5, 1.75]
    assert measured[0][1] == f"measured now, kept in {path}"
    assert kept[0][1].startswith(f"measured by an earlier run, in {path} (")


def test_the_file_of_the_first_rank_counts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the others have none, or another one."""
    read, said = kept_links._read, []
    monkeypatch.setattr(kept_links, "_read", lambda *given: said.append(read(*given)) or said[-1])
    machine.run()
    machine.run()
    assert said == [None, FOUND]  # asked once for the group


def other_settings(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("NCCL_P2P_DISABLE", "1")


def other_host(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(socket, "gethostname", lambda: "elsewhere")


def other_backend(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    machine.backend = "gloo"


@pytest.mark.parametrize("other", [other_settings, other_host, other_backend])
def test_other_machines_have_other_files(
    machine: Machine,
    other: Callable[[Machine, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.run()
    other(machine, monkeypatch)
    machine.run()
    assert machine.probes == [2] * 4
    assert len(machine.files) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"hosts": [4]},
        {"first": {}},
        {"between": None},
        {"inside": []},
        {"inside": [1.0]},
        {"inside": [-1.0, 1e-5]},
        {"inside": [float("nan"), 1e-5]},
        {"inside": ["fast", 1e-5]},
    ],
)
def test_a_file_that_says_something_else(machine: Machine, change: dict[str, object]) -> None:
    machine.run()
    (path,) = machine.files
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    assert [links for links, _ in machine.run()] == [FOUND] * 4
    assert machine.probes == [2] * 4
    assert path.read_text() == whole


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\x80\x04N."])
def test_a_file_that_cannot_be_read(machine: Machine, content: bytes) -> None:
    machine.run()
    (path,) = machine.files
    path.write_bytes(content)
    assert [links for links, _ in machine.run()] == [FOUND] * 4
    assert machine.probes == [2] * 4


def test_no_file_can_be_written(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.folder / "seqshard").write_text("in the way")
    assert machine.run() == [(FOUND, "measured now")] * 4
    assert machine.run() == [(FOUND, "measured now")] * 4


def test_measured_anew_if_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept; the choice of the first rank counts."""
    machine.run()
    (path,) = machine.files
    path.write_text(path.read_text().replace("2.3", "2.4"))
    monkeypatch.setenv(LINKS, "measure")
    machine.run()
    assert machine.probes == [2] * 4
    assert json.loads(path.read_text())["between"] == [2.3e8, 4.9e-5, 1.75]
    monkeypatch.setenv(LINKS, "anew")
    with pytest.raises(ValueError, match="SEQSHARD_LINKS must be kept or measure, got 'anew'"):
        require_choice()
