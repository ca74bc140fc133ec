"""Our functions in nnscaler: cut on the sequence, trained on real ranks, equal to one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ranks import Pool

from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import calls_of, groups_of, training
from on_nnscaler.support import jobs, policies

pytestmark = pytest.mark.nnscaler

FUNCTIONS = (
    models.ring,
    models.ring_with_everything,
    models.ring_by_rows,
    models.zigzag,
    models.varlen,
    models.varlen_by_rows,
    models.window,
    models.packed_window,
    models.streaming,
    models.packed_streaming,
    models.masked,
    models.shuffled,
    models.shuffled_documents,
)
MAIN = (models.ring, models.zigzag, models.varlen, models.window, models.packed_window)


@pytest.mark.parametrize("attend", FUNCTIONS)
def test_two_ranks(two_ranks: Pool, attend: Any) -> None:
    ranks = jobs.trained(two_ranks, training(attend, plan=2))
    for n, rank in enumerate(ranks):
        calls = calls_of(rank.code)
        told = f"q_rows=({n}, 2)" if "rows" in attend.__name__ else "process_group=[0, 1]"
        assert len(calls) == 2 and all(told in call for call in calls), calls
        if attend is models.ring_with_everything:
            numerics = "deterministic=True", "reduce_dtype=torch.float64"
            assert all(option in call for call in calls for option in numerics), calls


@pytest.mark.parametrize("attend", MAIN)
def test_four_ranks(four_ranks: Pool, attend: Any) -> None:
    ranks = jobs.trained(four_ranks, training(attend, plan=4))
    assert [groups_of(rank.code) for rank in ranks] == 4 * [{(0, 1, 2, 3)}]


@pytest.mark.parametrize("attend", MAIN)
def test_two_ranks_twice(four_ranks: Pool, attend: Any) -> None:
    """Two copies of the model, each over two ranks, with batches of their own."""
    ranks = jobs.trained(four_ranks, training(attend, plan=2))
    assert [groups_of(rank.code) for rank in ranks] == 2 * [{(0, 1)}] + 2 * [{(2, 3)}]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("attend", [models.ring, models.varlen])
def test_end2end_with_micro_batches(four_ranks: Pool, attend: Any, asynchronous: bool) -> None:
    config = {"use_async_reducer": asynchronous, "reducer_bucket_cap_mb": 0.001}
    jobs.trained(four_ranks, training(attend, plan=2, micro_batches=3, end2end=True, config=config))


def test_micro_batches(two_ranks: Pool) -> None:
    jobs.trained(two_ranks, training(models.zigzag, plan=2, micro_batches=2))


@pytest.mark.parametrize(("zero", "groups"), [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("attend", [models.ring, models.packed_window])
def test_zero(four_ranks: Pool, attend: Any, zero: int, groups: int) -> None:
    job = training(attend, plan=2, config={"use_zero": zero, "zero_ngroups": groups})
    jobs.trained(four_ranks, job)


@pytest.mark.parametrize("zero", [0, 1])
def test_going_on_with_another_plan(four_ranks: Pool, zero: int) -> None:
    """Merged parameters and optimizer state of one plan are taken up by another."""
    pairs = {"pas_config": {"max_partition_degree": 2}}
    first = training(models.ring, plan=4, steps=2, config={"use_zero": zero})
    both = partial(policies.attention, cuts=[("g", 2), ("l", 2)])
    then = replace(first, policy=both, config={"use_zero": 1 - zero, **pairs})
    ranks = jobs.trained(four_ranks, first, then)
    assert len(ranks[0].losses) == 4
    assert [groups_of(rank.code) for rank in ranks] == 2 * [{(0, 1)}] + 2 * [{(2, 3)}]


@pytest.mark.parametrize("attend", [models.ring, models.zigzag, models.varlen, models.window])
def test_fp32(four_ranks: Pool, attend: Any) -> None:
    """One step over two copies of two ranks."""
    job = replace(training(attend, plan=2, steps=1), model=partial(models.single, attend))
    jobs.trained(four_ranks, job, tolerance=1e-6)
