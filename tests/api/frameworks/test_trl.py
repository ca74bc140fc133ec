"""TRL's SFT on packed documents over ranks: losses of training and of evaluation are those of one
process. It runs where trl is installed."""

from __future__ import annotations

import pytest
from ranks import Pool

pytest.importorskip("trl", reason="trl is not installed")

import trl_jobs
from trl import SFTTrainer


def test_losses_are_those_of_one_process(two_ranks: Pool) -> None:
    losses, evaluated = trl_jobs.trained(SFTTrainer, "sdpa")
    assert len(losses) == 3 and len(set(losses)) == 3
    for found, loss in two_ranks.run(trl_jobs.on_ranks):
        assert found == pytest.approx(losses, abs=1e-5)
        assert loss == pytest.approx(evaluated, abs=1e-5)
