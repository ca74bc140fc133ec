"""The benchmark of kernels, as far as a CPU goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    rows = json.loads(told.read_text())["rows"]
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
