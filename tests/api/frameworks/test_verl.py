"""verl's own FSDP engine with packed rollouts over ranks: log-probs, entropies, values, losses and
norms of gradients are those of its padded rows on one process. It runs where verl is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doc_blocks import diff_of
from ranks import Pool

pytest.importorskip("verl", reason="verl is not installed")

import verl_jobs
from verl.workers.engine import EngineRegistry


@pytest.mark.parametrize("ours", [verl_jobs.Actor, verl_jobs.Critic])
def test_rollouts_are_those_of_verl_alone(two_ranks: Pool, tmp_path: Path, ours: type) -> None:
    verl_jobs.save_model(str(tmp_path))
    each, numbers = verl_jobs.alone(ours.__bases__[1], str(tmp_path))
    assert len({len(rollout) for rollout in each}) > 4  # of changing lengths
    over_ranks = two_ranks.run(verl_jobs.on_ranks, ours, str(tmp_path))
    for found, _ in over_ranks:
        for one, expected in zip(found, each, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    assert over_ranks[0][1] == pytest.approx(numbers, rel=1e-4)


def test_the_file_of_the_page_is_chosen_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    of_file = diff_of("verl")[1:]
    end = next(n for n, line in enumerate(of_file) if line.startswith(" #"))
    made: dict[str, type] = {}
    exec("\n".join(line[1:] for line in of_file[:end]), made)
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    for backend in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", backend) is made["Engine"]
