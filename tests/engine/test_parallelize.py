"""The embedded engine on real ranks: same loss and gradients as one process."""

from __future__ import annotations

from typing import Any

import engine_jobs
import pytest
import refusal_jobs
import torch
from dense import assert_same
from ranks import Pool, worlds
from steps import assert_gradients


def check(
    pool: Pool,
    op: str,
    policy: Any,
    plan: int,
    batch: int,
    length: int,
    layers: int,
    lowered: bool = True,
) -> str:
    """Compare with one process to 1e-10; returns the plan's text."""
    model, losses = engine_jobs.alone(op, pool.size // plan, batch, length, layers)
    given = op, policy, plan, batch, length, layers, lowered
    replies = pool.run(engine_jobs.loss_and_gradients, *given)
    for rank, (loss, grads, _) in enumerate(replies):
        assert abs(loss - losses[rank // plan]) < 1e-10
        assert_gradients(f"rank {rank}", grads, model)
    return replies[0][2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "policy", "batch", "length", "layers"),
    [
        ("zigzag", "cp", 3, 32, 1),
        ("varlen", "cp", 1, 30, 1),
        ("ring", "dp", 3, 16, 1),
        ("ring", engine_jobs.heads_then_sequence, 1, 16, 2),
    ],
)
def test_two_ranks(
    two_ranks: Pool, op: str, policy: Any, batch: int, length: int, layers: int
) -> None:
    """Other tests of the quick suite show each of these over ranks in another way."""
    check(two_ranks, op, policy, 2, batch, length, layers)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["ring", "varlen"])
def test_on_dtensors(two_ranks: Pool, op: str) -> None:
    check(two_ranks, op, "cp", 2, 1, 33, 1, lowered=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "policy", "plan", "batch", "length"),
    [
        ("ring", "cp", 4, 1, 30),
        pytest.param("zigzag", "cp", 2, 1, 20, marks=pytest.mark.slow),
        pytest.param("varlen", "cp", 2, 1, 20, marks=pytest.mark.slow),
        pytest.param("ring", "dp", 4, 4, 12, marks=pytest.mark.slow),
        pytest.param("ring", "dp", 2, 2, 12, marks=pytest.mark.slow),
        ("ring", "cp", 1, 1, 12),
    ],
)
@worlds(cpus=[2, 4, 8], gpus=[4, 8])
def test_more_ranks(ranks: Pool, op: str, policy: str, plan: int, batch: int, length: int) -> None:
    """plan < 4 is data parallel outside: copies of two ranks, or of one. On two ranks losses and
    gradients are compared in ``module/test_training.py`` too, where states are loaded."""
    check(ranks, op, policy, min(plan, ranks.size), batch, length, 1)


def test_the_plan_says_what_moves(two_ranks: Pool) -> None:
    """And the counted bytes are the planned ones."""
    per_rank = two_ranks.run(engine_jobs.counted_and_planned_bytes)
    forward, backward = (max(reply[n] for reply in per_rank) for n in (0, 1))
    *planned, text = per_rank[0][2:]
    assert [forward, backward] == planned
    assert forward > 0
    lines = [line.split("  ") for line in text.splitlines()]
    assert text.startswith("plan: 2 ranks a copy, copies of the model: 1\n")
    attention = next(line for line in text.splitlines() if "wrap_ring_attn_func" in line)
    assert attention.split()[1:4] == ["1", "l", "/"]
    assert "k, v (imbalance" in attention
    assert any("all-reduce of gradients, 2 ranks" in cell for line in lines for cell in line)
    # Nothing as large as an activation moves outside attention.
    assert "whole of [1, 33" not in text


@pytest.mark.thin(3)
@pytest.mark.parametrize("form", ["classes second", "sum", "smoothed", "weighted", "ignore 5"])
def test_forms_of_cross_entropy(two_ranks: Pool, form: str) -> None:
    given = engine_jobs.loss_inputs()
    given["x"].requires_grad_()
    model = engine_jobs.Losses(form)
    loss = model(**given)
    loss.backward()
    for got, weight_grad, x_grad in two_ranks.run(engine_jobs.loss_form, form):
        assert abs(got - loss.item()) < 1e-10
        assert_same("weight", weight_grad, model.project.weight.grad)
        assert_same("x", x_grad, given["x"].grad)


def test_inputs_that_differ_from_the_example(two_ranks: Pool) -> None:
    said = two_ranks.run(refusal_jobs.called_wrongly)
    assert said[0] == said[1]
    assert [line.split(":")[0] for line in said[0]] == ["CaptureError"] * 4
    assert "x: expected (2, 8, 8) torch.float32 as in dummy_forward_args, got (2, 9)" in said[0][0]


def test_a_dtype_that_makes_ranks_alike(two_ranks: Pool) -> None:
    """What a module was in before does not matter."""
    assert two_ranks.run(refusal_jobs.refused, "dtypes of their own, made one") == ["no error"] * 2
    said = two_ranks.run(refusal_jobs.refused, "dtypes of their own")
    assert all("rank 0 (8, 8) torch.float64, rank 1 (8, 8) torch.float32" in each for each in said)


def test_train_and_eval_have_their_own_plans(two_ranks: Pool) -> None:
    for got, want in two_ranks.run(engine_jobs.eval_mode_and_dropout):
        assert got == pytest.approx(want, rel=1e-5)


def test_all_ranks_start_from_the_same_weights(two_ranks: Pool) -> None:
    first, second = two_ranks.run(engine_jobs.seeds_may_differ)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_copies_may_use_different_parameters(two_ranks: Pool) -> None:
    """And submodules keep their own mode: the dropout here is in eval mode."""
    module = engine_jobs.Branches()
    module.drop.eval()
    for second in (False, True):
        module(torch.ones(2, 4), second).backward()
    assert module.unused.weight.grad is None
    for grads in two_ranks.run(engine_jobs.copies_use_different_parameters):
        assert_gradients("copies", grads, module, 1e-6)
