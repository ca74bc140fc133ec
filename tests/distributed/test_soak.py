"""Steps with new lengths each leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import soak_jobs
from ranks import Pool, worlds

from customized_ops.ring_attention.core.plan import plan

JOBS, STEPS = 20, 50  # a job of few steps, because a busy machine takes seconds for each


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_memory_is_flat_over_a_thousand_steps(ranks: Pool) -> None:
    """The first half of the steps fills every cache, and the second adds nothing to any."""
    check(ranks, soak_jobs.soak)


@pytest.mark.slow
@worlds(cpus=[2], gpus=[])
def test_memory_of_a_module_is_flat_over_a_thousand_steps(ranks: Pool) -> None:
    check(ranks, soak_jobs.soak_module)


@pytest.mark.slow
@worlds(cpus=[2], gpus=[])
def test_memory_of_a_hugging_face_training_is_flat_over_a_thousand_steps(ranks: Pool) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
    check(ranks, soak_jobs.soak_llama)


def check(ranks: Pool, soak: Callable[[int, int], Any]) -> None:
    found = [ranks.run(soak, STEPS, seed) for seed in range(JOBS)]
    ranks.run(soak_jobs.stop)
    for (early, few), (late, many) in zip(found[JOBS // 2 - 1], found[-1], strict=True):
        host, on_gpu, process = (b - a for a, b in zip(early, late, strict=True))
        assert host < 200_000, f"{host} bytes more on the host"
        assert on_gpu <= 0, f"{on_gpu} bytes more on the GPU"
        assert process < 20_000, f"{process} KiB more in the process"
        held, most = many["customized_ops.ring_attention.core.plan.plan._LAST"]
        assert held == most == plan._LAST.maxlen  # so the steps did fill it
        for name, (count, limit) in many.items():
            before = few.get(name, (0, None))[0]
            assert count <= (before if limit is None else limit), f"{name} held {before}, {count}"
