"""nnscaler's own planner, from profiling to training, and constraints on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Pool

from on_nnscaler.models import plain_models as models
from on_nnscaler.support import autodist, jobs
from on_nnscaler.support.jobs import Training

pytestmark = pytest.mark.nnscaler

LINEAR = "torch.nn.functional.linear"


def test_autodist(two_ranks: Pool, tmp_path: Path) -> None:
    config = {"pas_config": autodist.settings(tmp_path)}
    jobs.trained(two_ranks, Training(models.tiny, models.batch, "autodist", plan=2, config=config))
    linears = [name for name, op, _ in autodist.chosen_plan(tmp_path) if op == LINEAR]
    assert linears == [*(f"blocks.0.{name}" for name in ("q", "k", "v", "up", "down")), "head"]


def test_a_plan_for_more_devices_than_there_are(tmp_path: Path) -> None:
    config = {"pas_config": autodist.settings(tmp_path, parallel_profile=True)}
    training = Training(models.tiny, models.batch, "autodist", plan=8, config=config)
    first, *_, last = jobs.generate(training, tmp_path / "code", ranks=8)
    assert "rank = 0" in first and "rank = 7" in last
    assert (tmp_path / "profile" / "comp" / f"{LINEAR}.json").exists()


@pytest.mark.parametrize("allowed", [(0, 1), (1, 0), None])
def test_constraints(two_ranks: Pool, tmp_path: Path, allowed: tuple[int, int] | None) -> None:
    path = autodist.constraints(
        tmp_path, {"op": LINEAR, "module": "Block", "allowed": [allowed] if allowed else []}
    )
    config = {"pas_config": autodist.settings(tmp_path, partition_constraints_path=path)}
    jobs.trained(two_ranks, Training(models.tiny, models.batch, "autodist", plan=2, config=config))
    plan = autodist.chosen_plan(tmp_path)
    assert [cut for _, op, cut in plan if op == LINEAR][:5] == 5 * [allowed]
