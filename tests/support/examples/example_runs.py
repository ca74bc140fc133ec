"""Examples and benchmarks in processes of their own, as users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SMALL = ["--device", "cpu", "--dtype", "float32", "--heads", "4:2", "--head-dim", "8"]


def run(
    script: str | Path, *arguments: str, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """A script of the examples, or another one. torchrun: it starts two ranks."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *start, str(EXAMPLES / script), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )


def measured(script: str | Path, *arguments: str, torchrun: bool = True) -> str:
    """What a benchmark of small heads printed."""
    done = run(script, *SMALL, *arguments, torchrun=torchrun)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    """Of a JSON file, those of a kind."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [each for each in found if each["line"] == kind]
