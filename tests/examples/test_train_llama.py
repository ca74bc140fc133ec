"""The demo, small: real ranks under torchrun, and what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "train_llama.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("op", "ranks"),
    [
        ("ring", 2),
        pytest.param("zigzag", 2, marks=pytest.mark.slow),
        pytest.param("varlen", 4, marks=pytest.mark.slow),
    ],
)
def test_same_loss_as_on_one_rank(op: str, ranks: int) -> None:
    done = run("--op", op, "--nproc", str(ranks), "--steps", "3", "--seq-len", "128")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert f"plan: {ranks} ranks a copy" in shown
    assert f"l / {ranks}" in shown
    assert len(re.findall(r"tokens/s", shown)) == 2
    first, last = (float(x) for x in re.search(r"loss (\S+) -> (\S+)", shown).groups())
    assert last < first
    difference = float(re.search(r"process \(largest difference (\S+),", shown)[1])
    assert difference < 1e-4


@pytest.mark.slow
def test_no_steps() -> None:
    done = run("--steps", "0")
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1] == "train_llama.py: error: argument --steps: 0 is not positive"
    )


@pytest.mark.slow
def test_a_difference_fails_the_run(tmp_path: Path) -> None:
    """The exit code is what `make demo` and CI see."""
    source = (ROOT / "examples" / "train_llama.py").read_text()
    broken = tmp_path / "train_llama.py"
    broken.write_text(source.replace("TOLERANCE = 1e-4", "TOLERANCE = -1.0"))
    for helper in ("curves.py", "text_corpus.py", "launch.py", "llama.py"):
        (tmp_path / helper).write_text((ROOT / "examples" / helper).read_text())
    command = [sys.executable, str(broken), "--steps", "1", "--seq-len", "64"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    assert "NOT SO: the loss curve is that of one process" in done.stdout, done.stderr
    assert done.returncode != 0
