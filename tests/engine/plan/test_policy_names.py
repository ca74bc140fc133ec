"""A mapping takes the names that the plan's table prints."""

from __future__ import annotations

from typing import Any
from unittest import mock

import engine_jobs
import planning_jobs
import pytest

from annotations import ComputeConfig
from annotations.engines.torch import EnginePlan, plan_without_ranks
from annotations.engines.torch.plan import dry_run
from annotations.engines.torch.plan.policies import PolicyError

captured: dict[tuple[str, int], Any] = {}


def planned(policy: Any, op: str = "ring", layers: int = 2) -> EnginePlan:
    """The plan of a Llama over two ranks, of which no move is free; each Llama is captured once."""
    model, given = engine_jobs.tiny_llama(op, layers), engine_jobs.sample(op, 1, 32)
    config, capture = ComputeConfig(2, 2, pas_config={"hoist": False}), dry_run.captured_in

    def once(*of: Any) -> Any:
        if (op, layers) not in captured:
            captured[op, layers] = capture(*of)
        return captured[op, layers]

    with mock.patch.object(dry_run, "captured_in", once):
        return plan_without_ranks(model, given, policy, config, planning_jobs.SLOW)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("ring", "wrap_ring_attn_func"),
        pytest.param("varlen", "wrap_ring_attn_varlen_func", marks=pytest.mark.slow),
    ],
)
def test_functions(op: str, name: str) -> None:
    node = name.removeprefix("wrap_").removesuffix("_func")
    for force, split in (("l", "l"), ("whole", None)):
        plan = planned({name: force}, op, 1)
        assert name in {row.op for row, _ in plan.rows}
        assert plan.splits[node] == split


def test_all_names_of_a_table() -> None:
    """The mapping leaves all open."""
    rows = [row for policy in ("cp", "tp") for row, _ in planned(policy).rows]
    names = {row.op for row in rows if row.op != "sync_grad" and not row.op.startswith("other ops")}
    assert any("*" in name for name in names) and any(" " in name for name in names)
    planned({name: ("any",) for name in names})


ANNOTATED = (
    "the policy names attn, but the annotated ops are: ring_attn, ring_attn_1, "
    "cross_entropy_sum_default; their functions: wrap_ring_attn_func, cross_entropy; their "
    "modules: blocks.*.attention"
)


def test_an_error_lists_the_names_that_fit() -> None:
    """Only annotated ops are split on an identifier."""
    with pytest.raises(PolicyError) as error:
        planned({"attn": "l"})
    assert str(error.value) == ANNOTATED
    with pytest.raises(PolicyError) as error:
        planned({"attn": 0})
    message, others, parameters = str(error.value).rsplit("; ", 2)
    assert message == ANNOTATED
    assert others.startswith("other ops: ") and ", blocks.*.gate, blocks.* silu," in others
    assert parameters.startswith("parameters: embed.weight, blocks.*.attention_norm.weight, ")
