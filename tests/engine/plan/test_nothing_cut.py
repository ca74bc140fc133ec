"""A plan says where nothing is cut."""

from __future__ import annotations

import engine_jobs
import pytest

from annotations import ComputeConfig
from annotations.engines.torch import plan_without_ranks

SAYS = "nothing is cut, so each rank computes all"


@pytest.mark.parametrize(("policy", "says"), [("auto", True), ("cp", False)])
def test_a_model_too_small_to_cut(policy: str, says: bool) -> None:
    model, example = engine_jobs.tiny_llama("ring", 1), engine_jobs.sample("ring", 1, 32)
    plan = plan_without_ranks(model, example, policy, ComputeConfig(2, 2))
    assert (SAYS in str(plan)) == says
