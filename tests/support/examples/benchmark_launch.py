"""Runs of the benchmark in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "benchmark" / "attention.py"
SMALL = ["--device", "cpu", "--dtype", "float32", "--heads", "4:2", "--head-dim", "8"]


def launch(script: Path, *arguments: str, ranks: bool = True) -> str:
    """What it printed. ranks: start two of them with torchrun."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if ranks else []
    command = [sys.executable, *start, str(script), *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    """Of a JSON file, those of a kind."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [each for each in found if each["line"] == kind]
