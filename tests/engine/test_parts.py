"""Training where a plan keeps parameters in parts: optimizers, norms, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import parts_jobs as jobs
import pytest
import torch
from dense import assert_same
from engine_jobs import sample, tiny_llama
from ranks import Pool, worlds
from shared.llama import Llama, LlamaConfig
from steps import assert_gradients

from annotations.engines.torch import EnginePlan, plan_without_ranks

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "optimizer", "overlap", "torchs"),
    [
        ("tp", FOREACH, False, True),
        pytest.param(NAMED, FUSED, True, False, marks=pytest.mark.slow),
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
        pytest.param("tp", (2,), FUSED, True, False, marks=pytest.mark.slow),
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


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("cp", marks=pytest.mark.slow), NAMED])
@worlds(cpus=[2], gpus=[2])
def test_parameters_kept_in_another_dtype(ranks: Pool, policy: Any) -> None:
    """Gradients are added up in the parameters' own, and so they are planned."""
    model = tiny_llama("ring")
    single = {n: p.float() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, single, (), sample("ring", 1, jobs.LENGTH))
    loss.backward()
    given, dtype = sample("ring", 1, jobs.LENGTH), torch.float32
    alone = plan_without_ranks(model, given, policy, jobs.config((2,)), compute_dtype=dtype)
    for got, grads, received, text in ranks.run(jobs.in_single_precision, policy):
        assert got == pytest.approx(loss.item(), rel=1e-5)
        assert {grad.dtype for grad in grads.values()} == {torch.float64}
        assert_gradients("in fp32", grads, model, 1e-4)
        plan = EnginePlan.from_json(text)
        assert received == plan.rows[-1][0].backward_bytes > 0
        assert plan.rows[-1] == alone.rows[-1]
        assert plan.held is not None and alone.held is not None
        for part in ("parameters", "gradients", "optimizer", "casts"):
            assert getattr(plan.held, part) == getattr(alone.held, part) > 0


@pytest.mark.slow
def test_memory_of_parameters_in_another_dtype() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig(dim=32, layers=1, heads=4, kv_heads=2, hidden=48, vocab=64))
        names = ("tokens", "targets", "position_ids")
        example = {name: torch.zeros(1, 64, dtype=torch.int64) for name in names}
    half = torch.bfloat16

    def plan(**dtypes: torch.dtype) -> EnginePlan:
        return plan_without_ranks(model, example, "tp", jobs.config((2,)), **dtypes)

    single, mixed, halves = plan(), plan(compute_dtype=half), plan(module_dtype=half)
    assert single.held is not None and mixed.held is not None and halves.held is not None
    assert mixed.held.parameters == mixed.held.gradients == single.held.parameters
    assert mixed.held.optimizer == halves.held.optimizer == single.held.optimizer
    assert mixed.held.casts == halves.held.parameters == single.held.parameters // 2
    assert halves.held.casts == single.held.casts == 0
    assert mixed.held.activations == halves.held.activations
    assert "casts of parameters" in str(mixed) and "casts" not in str(single)
    assert mixed.rows[-1] == single.rows[-1]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_saved_on_four_ranks_and_loaded_on_two(
    four_ranks: Pool, two_ranks: Pool, tmp_path: Path
) -> None:
    """In parts of other parameters and other sizes; the optimizer's state too."""
    model = tiny_llama("ring")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(6):
        optimizer.zero_grad()
        losses.append(model(**sample("ring", 1, jobs.LENGTH, step)))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), jobs.MAX_NORM)
        optimizer.step()
    folder = str(tmp_path / "saved")
    first = four_ranks.run(jobs.resumed, NAMED, (4,), None, folder, range(3))
    second = two_ranks.run(jobs.resumed, "tp", (2,), folder, None, range(3, 6))
    want = [loss.item() for loss in losses]
    assert first == [pytest.approx(want[:3], abs=1e-10)] * 4
    assert second == [pytest.approx(want[3:], abs=1e-10)] * 2


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_checkpointed_blocks(ranks: Pool) -> None:
    """Nothing that communicates runs again, though all of it is between ops."""
    model = tiny_llama("ring", layers=2)
    want = model(**sample("ring", 1, jobs.LENGTH))
    want.backward()
    plain, again = (ranks.run(jobs.checkpointed, again) for again in (False, True))
    for (loss, grads, collectives, held), (_, _, before, plain_held) in zip(
        again, plain, strict=True
    ):
        assert abs(loss - want.item()) < 1e-10
        assert collectives == before > 0 and held < 0.8 * plain_held
        assert_gradients("again", grads, model)
