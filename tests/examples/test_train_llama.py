"""The demo, small: real ranks, a pool's and under torchrun, and what it shows."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import example_jobs
import pytest
from example_runs import EXAMPLES, run
from ranks import Pool
from shared import launch


def arguments(op: str, ranks: int) -> list[str]:
    return f"--op {op} --nproc {ranks} --steps 3 --seq-len 128 --layers 1 --lr 0.01".split()


def check(shown: str, ranks: int) -> None:
    """Of all that the demo has printed: the loss falls, and is that of one process."""
    assert f"plan: {ranks} ranks a copy" in shown
    assert f"l / {ranks}" in shown
    assert len(re.findall(r"tokens/s", shown)) == 2
    first, last = (float(x) for x in re.search(r"loss (\S+) -> (\S+)", shown).groups())
    assert last < first
    difference = float(re.search(r"process \(largest difference (\S+),", shown)[1])
    assert difference < 1e-4


def test_same_loss_as_on_one_rank(two_ranks: Pool) -> None:
    replies = two_ranks.run(example_jobs.demo, arguments("ring", 2))
    assert [failed for failed, _ in replies] == [0, 0]
    check("".join(text for _, text in replies), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "ranks"), [("ring", 2), ("zigzag", 2), ("varlen", 4)])
def test_it_starts_its_own_ranks(op: str, ranks: int) -> None:
    done = run("train_llama.py", *arguments(op, ranks))
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, ranks)


class Started(Exception):
    """Where another program would have taken this one's place."""


def test_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments of this command, and none where this is a rank already."""

    def execv(program: str, command: list[str]) -> None:
        raise Started(program, command)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["train_llama.py", "--nproc", "3"])
    monkeypatch.delenv("RANK", raising=False)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "set")
    with pytest.raises(Started) as started:
        launch.start_ranks(3)
    program, command = started.value.args
    assert program == command[0] == sys.executable
    assert command[1:3] == ["-m", "torch.distributed.run"] and "--nproc-per-node=3" in command
    assert command[command.index("--") + 1 :] == sys.argv
    monkeypatch.setenv("RANK", "0")
    launch.start_ranks(3)


@pytest.mark.slow
def test_no_steps() -> None:
    done = run("train_llama.py", "--steps", "0")
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1] == "train_llama.py: error: argument --steps: 0 is not positive"
    )


@pytest.mark.slow
def test_a_difference_fails_the_run(tmp_path: Path) -> None:
    """The exit code is what `make demo` and CI see."""
    source = (EXAMPLES / "train_llama.py").read_text()
    broken = tmp_path / "train_llama.py"
    broken.write_text(source.replace("TOLERANCE = 1e-4", "TOLERANCE = -1.0"))
    shutil.copytree(EXAMPLES / "shared", tmp_path / "shared")
    done = run(broken, "--steps", "1", "--seq-len", "64", "--layers", "1")
    assert "NOT SO: the loss curve is that of one process" in done.stdout, done.stderr
    assert done.returncode != 0
