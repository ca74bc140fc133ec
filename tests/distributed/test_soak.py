"""Steps with new lengths each leave nothing behind."""

from __future__ import annotations

import pytest
import soak_jobs
from ranks import Pool, worlds


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_memory_is_flat_over_a_thousand_steps(ranks: Pool) -> None:
    for early, late in ranks.run(soak_jobs.soak, 1000):
        host, on_gpu, process = (b - a for a, b in zip(early, late, strict=True))
        assert host < 200_000, f"{host} bytes more on the host"
        assert on_gpu <= 0, f"{on_gpu} bytes more on the GPU"
        assert process < 20_000, f"{process} KiB more in the process"
