"""Batches of new lengths that were planned ahead: in no step does the host wait for the GPU."""

from __future__ import annotations

import pytest
import waiting_jobs as jobs
from ranks import Pool, worlds


@pytest.mark.parametrize("route", jobs.ROUTES)
@worlds(gpus=[2, 4])
def test_new_batches_are_not_waited_for(ranks: Pool, route: str) -> None:
    run(ranks, route, warm=4, steps=12)


@pytest.mark.slow
@pytest.mark.parametrize("route", jobs.ROUTES)
@worlds(cpus=[2], gpus=[])
def test_the_steps_run(ranks: Pool, route: str) -> None:
    """On CPUs nobody waits: so the test above is tested."""
    run(ranks, route, warm=1, steps=1)


def run(ranks: Pool, route: str, warm: int, steps: int) -> None:
    if route == "Hugging Face":
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert ranks.run(jobs.steps_without_waiting, route, warm, steps) == [[]] * ranks.size
