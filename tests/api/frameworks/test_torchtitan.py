"""torchtitan's own Trainer with debug models of varlen attention over ranks: losses, gradients
and validation are those of one process. It runs where torchtitan is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import diff_of
from ranks import Pool

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import titan_jobs
import torchtitan


@pytest.mark.parametrize(
    ("family", "balancer", "near"),
    [("llama3", "headtail", 1e-5), ("llama3", None, 1e-5), ("qwen3", "headtail", 1e-4)],
)
def test_training_is_that_of_one_process(
    two_ranks: Pool, family: str, balancer: str | None, near: float
) -> None:
    expected = titan_jobs.alone(family)
    for found in two_ranks.run(titan_jobs.trained, family, 2, balancer):
        assert found == pytest.approx(expected, rel=near)


def test_lines_that_the_page_takes_out_are_there() -> None:
    source, found = "", 0
    for line in diff_of("torchtitan"):
        if line.startswith(" # "):
            source = Path(torchtitan.__path__[0], line[3:].split(",")[0]).read_text()
        elif line.startswith("-"):
            assert line[1:] in source
            found += 1
    assert found == 4
