"""The command that says what this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from customized_ops.ring_attention.__main__ import main
from customized_ops.ring_attention.command_line import doctor
from customized_ops.ring_attention.core.comm.dist_comm import DistComm
from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL


def test_it_prints_what_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQSHARD_REPLAY", "tapes")
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert ["SEQSHARD_COMM", "auto"] in [line.split() for line in lines]
    assert ["SEQSHARD_REPLAY", "tapes"] in [line.split() for line in lines]
    assert any(line.startswith("torch ") and torch.__version__ in line for line in lines)
    for package in doctor.PACKAGES:
        (line,) = (line for line in lines if line.split()[0:1] == [package.distribution])
        assert ("not installed" in line) == (package.install in line)
    kernels = lines[lines.index(next(x for x in lines if x.startswith("kernel "))) + 1 :]
    assert [line.split()[0] for line in kernels[: len(KERNELS)]] == list(KERNELS)
    assert lines[-1].startswith("- ")


@pytest.mark.slow
def test_links_of_a_run() -> None:
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        "--nproc-per-node=4",
    ]
    command = [*launch, "-m", "customized_ops.ring_attention", "doctor"]
    costs = "link_bytes=2e9,between_bytes=1e9"
    given = {**os.environ, "SEQSHARD_HOSTS": "3,1", "SEQSHARD_COSTS": costs}
    text = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["4", "inside", "hosts,", "3,1", "gloo", "2", "12"] in lines
    assert ["between", "hosts", "gloo", "1", "48"] in lines
    assert "(links of CPUs are not measured" in text and "(links were" not in text
    assert text.count("ranks of the run") == 1  # one rank speaks


@pytest.mark.parametrize("links_from", ["", "measured by an earlier run, in links.json"])
def test_where_rates_are_from(links_from: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = object.__new__(DistComm)
    comm.size, comm.costs, comm.links_from = 2, H200_NCCL, links_from
    monkeypatch.setattr(doctor, "group_comm", lambda group: comm)
    for name, value in {"get_backend": "nccl", "is_torchelastic_launched": True}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *given: None)
    text = "\n".join(doctor._group(torch.device("cpu")))
    assert ("(links were measured by an earlier run, in links.json)" in text) == bool(links_from)
    assert "310" in text


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, which do not reach each other, and with no library."""
    has = SimpleNamespace(name="H200", major=9, minor=0, total_memory=140 * 2**30)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda n: has,
        "get_device_capability": lambda n: (9, 0),
        "can_device_access_peer": lambda a, b: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr(doctor, "_kernels", lambda device: [("flash4", "no")])


def test_a_machine_with_gpus(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(stdout="        GPU0    GPU1\nGPU0     X      NV18\n\nLegend:\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: said)
    text = doctor.doctor()
    assert "0    H200  9.0         140  none" in text
    assert "GPU0     X      NV18" in text
    assert "Legend" not in text
    assert "- kernel flash4: pip install '.[flash]'" in text
    assert "- kernel te, and te_cp: pip install '.[te]'" in text
    assert "ranks send NCCL messages" in text
    assert "nnscaler: " not in text  # which nobody needs


def test_no_nvidia_smi(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", fail)
    assert "links: nvidia-smi does not say (nvidia-smi)" in doctor.doctor()
