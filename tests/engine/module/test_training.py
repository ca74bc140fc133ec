"""Training on real ranks: gradients in buckets, norms, whole steps."""

from __future__ import annotations

import math

import pytest
import torch
import training_jobs as jobs
from dense import assert_same
from engine_jobs import Branches, tiny_llama
from ranks import Pool, worlds
from steps import assert_gradients

from annotations import ComputeConfig, parallelize


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("overlap", "plan"), [(True, 2), pytest.param(True, 4, marks=pytest.mark.slow), (False, 1)]
)
@worlds(cpus=[2, 4], gpus=[4])
def test_accumulated_gradients(ranks: Pool, overlap: bool, plan: int) -> None:
    """Of two micro-batches; only the second's backward moves any, and that while it runs."""
    if plan > ranks.size:
        pytest.skip("a copy is of more ranks")
    copies = ranks.size // plan
    model = tiny_llama("ring")
    for seed in range(1, 1 + 2 * copies):
        (model(**jobs.sample("ring", 1, 16, seed)) / copies).backward()
    for rank, (grads, started) in enumerate(ranks.run(jobs.accumulated, overlap, plan, 2)):
        assert started > 3 if overlap else started == 0
        assert_gradients(f"rank {rank}", grads, model)


def test_copies_that_differ_while_gradients_move(two_ranks: Pool) -> None:
    module = Branches()
    module.drop.eval()
    for second in (False, True):
        module(torch.ones(2, 4), second).backward()
    for grads, said in two_ranks.run(jobs.overlapped_and_different):
        assert "a second backward since the last sync_grad()" in said
        assert_gradients("copies", grads, module, 1e-6)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_norm_of_whole_and_cut_gradients(
    four_ranks: Pool, norm_type: float, max_norm: float
) -> None:
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in jobs.whole_grads()]
    for parameter, grad in zip(parameters, jobs.whole_grads(), strict=True):
        parameter.grad = grad
    want = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    for norm, grads in four_ranks.run(jobs.norm_of_parts, norm_type, max_norm):
        assert norm == pytest.approx(want.item(), rel=1e-12)
        for n, (got, parameter) in enumerate(zip(grads, parameters, strict=True)):
            assert_same(f"gradient {n}", got, parameter.grad, 1e-12)


def test_gradients_of_cut_parameters(four_ranks: Pool) -> None:
    """Whole ones are added up over all ranks, cut ones over copies."""
    for whole, cut in four_ranks.run(jobs.cut_parameters):
        assert whole.tolist() == [6.0] * 3
        assert torch.equal(cut, 3 * torch.arange(10.0).view(5, 2))


def test_clipping_on_one_rank_is_torchs() -> None:
    """But for rounding, as a captured graph may add gradients up in another order."""
    torch.manual_seed(0)
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).double()
    tied[1].weight = tied[0].weight
    x = torch.randn(2, 3, dtype=torch.float64)
    model = parallelize(tied, {"input": x}, "cp", ComputeConfig(1, 1))
    for module in (tied, model):
        module(x).square().sum().backward()
    want = torch.nn.utils.clip_grad_norm_(tied.parameters(), 0.1)
    measured, _ = model.clip_gnorm()
    norm, grads = model.clip_gnorm(0.1)
    assert norm == measured and norm.item() == pytest.approx(want.item(), rel=1e-12)
    for n, (mine, parameter) in enumerate(zip(grads, tied.parameters(), strict=True)):
        assert_same(f"gradient {n}", mine, parameter.grad, 1e-12)
    with pytest.raises(ValueError, match="got max_norm=-1, norm_type=2"):
        model.clip_gnorm(-1)


@pytest.mark.thin(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lowered", [False, pytest.param(True, marks=pytest.mark.slow)])
@worlds(cpus=[2], gpus=[2])
def test_end_to_end_steps(ranks: Pool, lowered: bool, overlap: bool) -> None:
    model = jobs.TwoResults()
    losses = []
    for seed in (1, 2, 3):
        loss, _ = model(jobs.sample("ring", 1, 16, seed))
        losses.append(loss.item())
        if seed < 3:
            (loss / 2).backward()
    for said, inferred, grads in ranks.run(jobs.end_to_end, overlap, lowered):
        assert said == pytest.approx([2 * loss for loss in losses], rel=1e-12)
        assert inferred == pytest.approx(losses, rel=1e-12)
        assert_gradients("a step", grads, model)


def test_steps_want_their_field_of_the_config() -> None:
    x = torch.zeros(2, 3)
    model = parallelize(torch.nn.Linear(3, 3), {"input": x}, "cp", ComputeConfig(1, 1))
    for step in (model.train_step, model.infer_step):
        with pytest.raises(RuntimeError, match=r"needs ComputeConfig\(use_end2end=True\)"):
            step([x])
    config = ComputeConfig(1, 1, use_end2end=True)
    model = parallelize(torch.nn.Linear(3, 3), {"input": x}, "cp", config, engine="torch")
    with pytest.raises(ValueError, match=r"must return a scalar loss first, got \(2, 3\)"):
        model.train_step([x])
    with pytest.raises(ValueError, match="got 1 and 2"):
        model.train_step([x], [False, True])


@pytest.mark.parametrize(
    ("plan", "overlap"), [(1, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
@worlds(cpus=[2], gpus=[2])
def test_gradients_are_added_up_once(ranks: Pool, plan: int, overlap: bool) -> None:
    """Whatever forwards run in between, and if some backward comes late."""
    copies, want = ranks.size // plan, {}
    for seed in (1, 2):
        model = tiny_llama("ring")
        model(**jobs.sample("ring", 1, 16, seed)).backward()
        want[seed] = [p.grad for p in model.parameters()]
    norm = math.sqrt(sum(g.square().sum() for g in want[1]))
    expected = {
        "clipped": [g * 0.1 / norm for g in want[1]],
        "first": [copies * g for g in want[1]],
        "second": [copies * g for g in want[2]],
        "of one copy": want[1],
        # What the plan cuts is added up over copies only.
        "by hand": [
            torch.full_like(p, copies if "gate" in name else ranks.size)
            for name, p in tiny_llama("ring").named_parameters()
        ],
    }
    for found in ranks.run(jobs.gradients_that_are_old, plan, overlap):
        for what, grads in expected.items():
            for n, (got, grad) in enumerate(zip(found[what], grads, strict=True)):
                assert_same(f"{what}, {n}", got, grad, 1e-5 if what == "clipped" else 1e-10)


WITHOUT_A_WORD = {  # in this order, as a warning is given once
    "cleared in place": None,
    "synced each time": "a backward has added to gradients that sync_grad() had added up",
    "made before": "the optimizer has the parameters of the module that was given to",
    "not synced": "optimizer.step() before sync_grad(): each rank has its own part",
}


def test_what_would_go_wrong_without_a_word(two_ranks: Pool) -> None:
    """And trainings that are right are left alone."""
    for said_of in two_ranks.run(jobs.guarded, list(WITHOUT_A_WORD)):
        for what, expected in WITHOUT_A_WORD.items():
            said = said_of[what]
            if expected is None:
                assert not [text for text in said if "sync_grad" in text]
            else:
                assert [text for text in said if expected in text], what
