"""Batches of new lengths that were planned ahead: in no step does the host wait for the GPU."""

from __future__ import annotations

import pytest
import torch
import waiting_jobs as jobs
from ranks import Pool, worlds

# DTensor copies lengths that are on the host to the device, and waits for that.
WAITS = pytest.mark.xfail(torch.cuda.is_available(), reason="known to wait", strict=True)
ROUTES = [
    pytest.param(route, marks=WAITS) if route == "parallelize" else route for route in jobs.ROUTES
]


@pytest.mark.parametrize("route", ROUTES)
@worlds(cpus=[2], gpus=[2, 4])
def test_new_batches_are_not_waited_for(ranks: Pool, route: str) -> None:
    """On CPUs the steps only run, so that the test itself is tested."""
    if route == "Hugging Face":
        pytest.importorskip("transformers", reason="transformers is not installed")
    gpus = ranks.backend == "nccl"
    assert ranks.run(jobs.steps_without_waiting, route, *((4, 12) if gpus else (1, 1))) == [
        [] for _ in range(ranks.size)
    ]
