"""Tokens that a model shuffles itself: attention follows them, and what cannot is refused."""

from __future__ import annotations

from typing import Any

import pytest
import token_order_jobs as jobs
from dense import assert_same
from ranks import Pool

from annotations import ComputeConfig
from annotations.engines.torch.capture.call_inputs import CaptureError
from annotations.engines.torch.plan.dry_run import plan_without_ranks
from annotations.errors import PartitionError


def check(pool: Pool, form: str, *how: Any) -> list[str]:
    """The plans of all ranks, whose losses and gradients are those of one process."""
    seed = how[1] if len(how) > 1 else 1
    model = jobs.model_of(form)
    loss = model(**jobs.inputs(seed))
    loss.backward()
    plans = []
    for rank, (got, grads, plan) in enumerate(pool.run(jobs.step, form, *how)):
        assert abs(got - loss.item()) < 1e-10 * max(1.0, abs(loss.item()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert_same(f"rank {rank}, {name}", grads[name], parameter.grad)
        plans.append(plan)
    return plans


@pytest.mark.thin(12)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("form", ["plain", "listed", "window", "lse", "mean", "whole keys"])
def test_equals_one_process(two_ranks: Pool, form: str, seed: int) -> None:
    """Also for documents of other lengths than it was planned for."""
    if form == "listed" and seed != 1:
        pytest.skip("its documents are constants")
    for plan in check(two_ranks, form, "cp", seed):
        assert "wrap_maybe_shuffle" in plan


TO_LAYOUTS = (
    "to zigzag",
    "to striped",
    "to zigzag, sharded",
    "to zigzag, zigzag attention",
    "to zigzag, masked",
    "to zigzag, documents",
    "to zigzag, rolled there",
)


@pytest.mark.thin(7)
@pytest.mark.parametrize("form", TO_LAYOUTS)
def test_layouts_of_a_models_own(two_ranks: Pool, form: str) -> None:
    for plan in check(two_ranks, form, "cp"):
        assert "move_tokens" in plan


@pytest.mark.thin(2)
@pytest.mark.parametrize("form", ["to zigzag, sharded", "to zigzag, rolled there"])
def test_layouts_where_attention_is_cut_on_heads(two_ranks: Pool, form: str) -> None:
    check(two_ranks, form, "ulysses")


@pytest.mark.slow
@pytest.mark.thin(2)
@pytest.mark.parametrize("form", ["plain", "whole keys"])
def test_on_four_ranks_and_lowered(four_ranks: Pool, form: str) -> None:
    check(four_ranks, form, "cp", 1, {}, True)


@pytest.mark.slow
def test_with_other_axes(four_ranks: Pool) -> None:
    """The sequence along one axis of a mesh, heads along the other."""
    check(four_ranks, "plain", "hybrid", 1, {"mesh_shape": (2, 2)})


@pytest.mark.thin(2)
@pytest.mark.parametrize("policy", ["ulysses", "auto"])
def test_where_attention_is_not_cut_on_the_sequence(two_ranks: Pool, policy: str) -> None:
    for plan in check(two_ranks, "window", policy):
        assert "wrap_maybe_shuffle" not in plan or "l / 2" in plan


def test_a_plan_given_back(two_ranks: Pool) -> None:
    for first, second in two_ranks.run(jobs.given_back):
        assert abs(first - second) < 1e-12


REFUSED = {
    "other documents": "is another tensor, other",
    "masked": "only attention over packed documents (cu_seqlens) takes that order",
    "dense": "only attention over packed documents (cu_seqlens) takes that order",
    "twice": "zigzag by document (cu_seqlens) already",
    "convolution": "it mixes tokens",
    "products": "it mixes tokens or depends on their places: shuffle_documents zigzag",
    "unknown op": "nothing is known of how it goes along tokens",
    "shuffled whole keys": "it mixes tokens or depends on their places: ",
    "natural operand": "operands have tokens in different orders",
    "returned": "the module returns",
    "unshuffled by others": "restores natural order of tokens that are zigzag by document (other)",
}


@pytest.mark.thin(8)
@pytest.mark.parametrize("form", REFUSED)
def test_refused_by_name(form: str) -> None:
    said = refused(form)
    assert REFUSED[form] in said, said
    assert "zigzag by document (cu_seqlens)" in said and "expected: " in said


def refused(form: str) -> str:
    """What a planner says of a model that mixes tokens of different orders."""
    with pytest.raises((PartitionError, CaptureError)) as error:
        plan_without_ranks(jobs.model_of(form), jobs.inputs(), "cp", ComputeConfig(2, 2))
    return str(error.value)


REFUSED_LAYOUTS = {
    "to zigzag, natural labels": "operands have tokens in different orders",
    "to zigzag, returned": "the module returns",
    "to zigzag, rolled in order": "it mixes tokens or depends on their places",
    "to zigzag, own layout": "layout=zigzag:24:2 is for the ranks of a group, but the call has no",
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("form", REFUSED_LAYOUTS)
def test_layouts_that_are_refused(two_ranks: Pool, form: str) -> None:
    """On every rank alike."""
    for said in two_ranks.run(jobs.refused, form):
        assert REFUSED_LAYOUTS[form] in said, said


@pytest.mark.thin(2)
@pytest.mark.parametrize("as_function", [False, True])
def test_a_policy_keeps_what_it_says_of_other_ops(as_function: bool) -> None:
    """Where attention is not cut on its sequence the graph is planned without the shuffles."""
    said = {"ring_attn": "h", "out.0.weight": 0, "move_tokens*": None}
    policy = (lambda ops, config: said) if as_function else said
    model = jobs.model_of("to zigzag, sharded")
    plan = plan_without_ranks(model, jobs.inputs(1), policy, ComputeConfig(2, 2))
    assert dict(plan.parameters) == {"out.0.weight": "S0"}
    assert set(plan.splits.values()) == {"h"}
