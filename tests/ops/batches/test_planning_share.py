"""Who plans in the steps is told, once."""

from __future__ import annotations

import warnings

import new_lengths_jobs
import pytest
from ranks import Pool, worlds

from customized_ops.ring_attention import AttnMask, Layout
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan import plans_ahead as planning_share
from customized_ops.ring_attention.core.plan.plans_ahead import LAST_PLANS as LAST
from customized_ops.ring_attention.core.plan.plans_ahead import PlanningShare
from customized_ops.ring_attention.core.plan.report.text import format_seconds


def told(monkeypatch: pytest.MonkeyPatch, step: float, planning: float, steps: int) -> list[str]:
    """What is said over steps that take so many seconds, some of them planning."""
    clock = iter(step * n for n in range(steps))
    monkeypatch.setattr(planning_share, "perf_counter", lambda: next(clock))
    share = PlanningShare()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            share.add(planning)
    return [str(warning.message) for warning in caught]


def test_a_tenth_of_each_step_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = told(monkeypatch, 0.2, 0.02, 3 * LAST)
    assert text.startswith("planning attention for new lengths took 10% of the last 9.8 s; ")
    assert "packed_batches" in text


def test_little_and_few_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not told(monkeypatch, 0.2, 0.005, 3 * LAST)
    assert not told(monkeypatch, 0.2, 0.2, LAST - 1)


def test_a_plan_says_what_it_took() -> None:
    plan = make_plan(AttnMask.causal(96), Layout.contiguous(96, 3), heads=(2, 2))
    assert 0 < plan.planning_seconds < 60
    *table, line = plan.report(2, 2, planning=True).splitlines()
    assert "\n".join(table) == plan.report(2, 2)
    assert (
        line
        == f"planned in {format_seconds(plan.planning_seconds)}, as each batch of new lengths is"
    )


@worlds(cpus=[2], gpus=[2])
def test_each_rank_tells_of_its_own(ranks: Pool) -> None:
    for texts in ranks.run(new_lengths_jobs.new_lengths, LAST + 10):
        assert [text for text in texts if text.startswith("planning attention for new lengths")]
