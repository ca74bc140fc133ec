"""The benchmark of kernels, as far as a CPU goes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import kernel_speed_jobs
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "kernel_speed.py"


def test_measures_every_mask_and_says_what_it_did_not(tmp_path: Path) -> None:
    told = tmp_path / "speed.json"
    options = "--device cpu --kernels torch reference --tokens 64 --op-tokens 64 --heads 4 2"
    options += " --head-dim 16 --dtype float32 --runs 3 --speeds --json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split(), str(told)],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *rows = map(json.loads, told.read_text().splitlines())
    assert first["arguments"]["tokens"] == [64] and "torch" in first["versions"]
    assert [(r["mask"].split(",")[0], r["kernel"]) for r in rows] == [
        (mask, kernel)
        for mask in ("causal", "packed", "block-causal 512")
        for kernel in ("torch", "reference")
    ]
    assert all(r["forward"] > 0 and r["backward"] > 0 for r in rows)
    assert rows[0]["pairs"] == 64 * 65 // 2
    assert rows[0]["raw_forward"] > 0 and rows[0]["raw_backward"] > 0 and rows[0]["op"] > 0
    assert rows[2]["raw_forward"] is None
    assert rows[2]["notes"] == ["raw call: the library has no single call for this"]
    assert "[1] torch: raw call: the library has no single call for this" in done.stdout
    assert "SPEEDS = {'torch': {'causal': {64: (" in done.stdout


def test_starts_nothing_after_its_time() -> None:
    options = "--device cpu --kernels torch --tokens 64 --seconds 0"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split()], capture_output=True, text=True, check=True
    )
    assert "torch: not measured: 0 s were over" in done.stdout


def test_a_crash_costs_the_rest_of_a_kernel_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    kernel_speed = importlib.import_module("kernel_speed")
    monkeypatch.setattr(kernel_speed, "Bench", kernel_speed_jobs.Troubled)
    options = "--device cpu --kernels torch cudnn reference --tokens 64"
    kernel_speed.main(options.split())
    done = capsys.readouterr().out.splitlines()
    lines = [line.split(" | ") for line in done if line.startswith("| ") and "64" in line]
    assert [(cells[2], cells[3], cells[-1]) for cells in lines] == [
        *((kernel, "100", " |") for kernel in ("torch", "cudnn", "reference")),
        *(("torch", "", "[1] |"), ("cudnn", "", "[2] |")),
        ("reference", "200", " |"),
        *(("torch", "", "[1] |"), ("cudnn", "", "[2] |")),
        ("reference", "300", " |"),
    ]
    assert done[-2:] == [
        "[1] torch: no figures from here on: its process died, exit code -9",
        "[2] cudnn: no figures from here on: RuntimeError: an illegal memory access was "
        "encountered",
    ]


def test_what_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    own_process = importlib.import_module("own_process")
    worker = own_process.Worker(kernel_speed_jobs.Sleeper)
    assert worker.ask(0, 60) == 0
    for _ in range(2):
        with pytest.raises(own_process.Lost, match=r"^no answer in 0 s$"):
            worker.ask(3600, 0.2)
