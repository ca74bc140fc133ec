"""Training where a plan keeps parameters in parts: optimizers, norms, checkpoints."""

from __future__ import annotations

import math
from typing import Any

import parts_jobs as jobs
import pytest
from dense import assert_same
from ranks import Pool, worlds

FOREACH, FUSED = {"foreach": True}, {"fused": True}
# Some weights in parts, gathered where they are read; the rest is whole.
NAMED = {"*.gate.weight": 0, "embed.weight": 1}


def check(
    pool: Pool,
    policy: Any,
    shape: tuple[int, ...],
    optimizer: dict[str, bool],
    overlap: bool,
    torchs: bool,
) -> None:
    parameters, norms = jobs.alone(pool.size // math.prod(shape))
    assert min(norms) > jobs.MAX_NORM
    for got, measured in pool.run(jobs.trained, policy, shape, optimizer, overlap, torchs):
        assert measured == pytest.approx(norms, rel=1e-10)
        for name, parameter in parameters.items():
            assert_same(name, got[name], parameter)


@pytest.mark.parametrize(
    ("policy", "optimizer", "overlap", "torchs"),
    [
        ("tp", FOREACH, False, True),
        (NAMED, FUSED, True, False),
    ],
)
@worlds(cpus=[2], gpus=[2])
def test_optimizers_that_take_all_at_once(
    ranks: Pool, policy: Any, optimizer: dict[str, bool], overlap: bool, torchs: bool
) -> None:
    check(ranks, policy, (2,), optimizer, overlap, torchs)


@pytest.mark.parametrize(
    ("policy", "shape", "optimizer", "overlap", "torchs"),
    [
        # Two copies of the model, each in parts.
        ("tp", (2,), FUSED, True, True),
        pytest.param("tp", (2, 2), FOREACH, False, False, marks=pytest.mark.slow),
        pytest.param({"*.gate.weight": (0, 1)}, (2, 2), FUSED, False, True, marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[4], gpus=[4])
def test_on_two_axes(
    ranks: Pool,
    policy: Any,
    shape: tuple[int, ...],
    optimizer: dict[str, bool],
    overlap: bool,
    torchs: bool,
) -> None:
    check(ranks, policy, shape, optimizer, overlap, torchs)
