"""Plans of nnscaler's own policies, trained on real ranks, equal plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import Pool

from on_nnscaler.models import plain_models as models
from on_nnscaler.support import jobs, policies
from on_nnscaler.support.jobs import Training

pytestmark = pytest.mark.nnscaler


def test_a_plan_of_two(two_ranks: Pool) -> None:
    jobs.trained(two_ranks, Training(models.tiny, models.batch, policy="tp", plan=2))


def test_a_plan_of_two_twice(four_ranks: Pool) -> None:
    jobs.trained(four_ranks, Training(models.tiny, models.batch, policy="tp", plan=2))


def test_a_plan_of_four(four_ranks: Pool) -> None:
    jobs.trained(four_ranks, Training(models.tiny, models.batch, policy="tp", plan=4))


def test_micro_batches(two_ranks: Pool) -> None:
    jobs.trained(two_ranks, Training(models.tiny, models.batch, plan=2, micro_batches=2))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_end2end(four_ranks: Pool, asynchronous: bool) -> None:
    config = {"use_async_reducer": asynchronous, "reducer_bucket_cap_mb": 0.001}
    training = Training(
        models.tiny, models.batch, plan=2, micro_batches=3, end2end=True, config=config
    )
    jobs.trained(four_ranks, training)


# A group of ZeRO 3 with one rank in it is left out: nnscaler drops ZeRO there, and the code that it
# generates asks for it all the same.
@pytest.mark.parametrize(
    ("zero", "plan", "groups"),
    [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (3, 1, 1), (3, 1, 2), (3, 2, 1)],
)
def test_zero(four_ranks: Pool, zero: int, plan: int, groups: int) -> None:
    config = {"use_zero": zero, "zero_ngroups": groups}
    jobs.trained(four_ranks, Training(models.tiny, models.batch, plan=plan, config=config))


@pytest.mark.parametrize("zero", [0, 1])
def test_going_on_with_another_policy(four_ranks: Pool, zero: int) -> None:
    first = Training(
        models.tiny, models.batch, "tp", plan=2, steps=2, config={"use_zero": 1 - zero}
    )
    then = replace(first, policy=policies.sequence_by_plans, config={"use_zero": zero})
    ranks = jobs.trained(four_ranks, first, then)
    assert len(ranks[0].losses) == 4


def test_the_comparison_can_fail() -> None:
    training = Training(models.tiny, models.batch)
    got, want = (jobs.train_alone(training, units=1)[0] for _ in range(2))
    jobs.assert_equal(got, want, 1e-10)
    for wrong in (
        got.losses[2],
        *(v["head.weight"][0] for v in (got.gradients[2], got.parameters)),
    ):
        wrong[0] += 1e-8
        with pytest.raises(AssertionError):
            jobs.assert_equal(got, want, 1e-10)
        wrong[0] -= 1e-8
