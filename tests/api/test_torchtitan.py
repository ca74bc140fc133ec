"""torchtitan's own Trainer with its debug model of varlen attention over ranks: losses, gradients
and validation are those of one process. It runs where torchtitan is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import diff_of
from ranks import Pool

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import titan_jobs
import torchtitan


@pytest.mark.parametrize("balancer", ["headtail", None])
def test_training_is_that_of_one_process(two_ranks: Pool, balancer: str | None) -> None:
    expected = titan_jobs.alone()
    for found in two_ranks.run(titan_jobs.trained, 2, balancer):
        assert found == pytest.approx(expected, rel=1e-5)


def test_lines_that_the_page_takes_out_are_there() -> None:
    source, found = "", 0
    for line in diff_of("torchtitan"):
        if line.startswith(" # "):
            source = Path(torchtitan.__path__[0], line[3:].split(",")[0]).read_text()
        elif line.startswith("-"):
            assert line[1:] in source
            found += 1
    assert found == 4
