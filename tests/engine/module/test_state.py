"""What a training run keeps: saved on some ranks, loaded on others; and sharded over ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import state_jobs as jobs
import torch
from dense import assert_same
from engine_jobs import sample, tiny_llama
from ranks import JobFailed, Pool, worlds


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_saved(
    four_ranks: Pool, two_ranks: Pool, tmp_path: Path
) -> None:
    """On fewer ranks, to 1e-9; and bit for bit on as many, whose processes are new."""
    first, second = str(tmp_path / "of four"), str(tmp_path / "of two")
    on_four = four_ranks.run(jobs.trained, None, first, 30, 30)
    on_two = two_ranks.run(jobs.trained, first, second, 80, jobs.STEPS)
    with pytest.raises(JobFailed, match="the process died"):
        two_ranks.run(jobs.killed)
    assert two_ranks.run(jobs.trained, second, None, jobs.STEPS, jobs.STEPS) == [
        losses[80 - 30 :] for losses in on_two
    ]
    alone = jobs.alone()
    assert alone[-1] < alone[0] / 2
    for losses, expected in [(x, alone[:30]) for x in on_four] + [(x, alone[30:]) for x in on_two]:
        assert len(losses) == len(expected)
        assert np.abs(np.subtract(losses, expected)).max() < 1e-9


@pytest.mark.slow
def test_an_optimizer_whose_state_is_sharded(two_ranks: Pool) -> None:
    model = tiny_llama("ring")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(**sample("ring", 1, 16, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    for parameters in two_ranks.run(jobs.with_sharded_optimizer, 3):
        for n, (got, parameter) in enumerate(zip(parameters, model.parameters(), strict=True)):
            assert_same(f"parameter {n}", got, parameter.detach())


@worlds(cpus=[4], gpus=[4])
def test_fully_sharded_parameters_and_a_cut_sequence(ranks: Pool) -> None:
    model = jobs.OverTwoAxes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        (model(*jobs.tokens_and_targets(step)) / 24).backward()
        optimizer.step()
    for parameters in ranks.run(jobs.fully_sharded, 3):
        for n, (got, parameter) in enumerate(zip(parameters, model.parameters(), strict=True)):
            assert_same(f"parameter {n}", got, parameter.detach())
