"""Activation checkpointing, mixed precision and no_grad under the embedded engine."""

from __future__ import annotations

import memory_jobs as jobs
import pytest
import torch
from dense import assert_same
from engine_jobs import sample, tiny_llama
from ranks import Pool, worlds
from steps import assert_gradients


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_checkpointed_blocks(ranks: Pool) -> None:
    """The same numbers and messages, less held between forward and backward."""
    model = tiny_llama("ring", layers=2)
    want = model(**sample("ring", 1, 64))
    want.backward()
    plain, again = (ranks.run(jobs.recomputed, again) for again in (False, True))
    for (loss, grads, moved, held), (_, _, plain_moved, plain_held) in zip(
        again, plain, strict=True
    ):
        assert abs(loss - want.item()) < 1e-10
        assert moved == plain_moved and min(moved) > 0
        assert held < 0.6 * plain_held
        for n, (grad, parameter) in enumerate(zip(grads, model.parameters(), strict=True)):
            assert_same(f"parameter {n}", grad, parameter.grad)


@pytest.mark.slow
@worlds(cpus=[2], gpus=[2])
def test_checkpointed_dropout(ranks: Pool) -> None:
    """It is drawn again: no rank waits for another in it."""
    plain, again = (ranks.run(jobs.dropped_again, again) for again in (False, True))
    for (want, wanted, once), (loss, grads, twice) in zip(plain, again, strict=True):
        assert once == [2, 0] and twice == [2, 2]
        assert abs(loss - want) < 1e-10
        for n, (grad, expected) in enumerate(zip(grads, wanted, strict=True)):
            assert_same(f"parameter {n}", grad, expected)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [1, 2])
@worlds(cpus=[2], gpus=[2])
def test_compute_dtype(ranks: Pool, plan: int) -> None:
    """Parameters and gradients in fp64, what lies between in fp32."""
    model = tiny_llama("ring")
    single = {n: p.float() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, single, (), sample("ring", 1, 16))
    loss.backward()
    for got, grads in ranks.run(jobs.in_single_precision, plan):
        assert got == pytest.approx(loss.item(), rel=1e-5)
        assert {grad.dtype for grad in grads.values()} == {torch.float64}
        assert_gradients("in fp32", grads, model, 1e-4)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("autocast around", "torch.autocast around a parallelized module cannot change its graph"),
        ("no_grad", "switches gradients off for what depends on x, p_a_weight, p_a_bias"),
        ("reentrant", "checkpoint with use_reentrant=True), which is not supported"),
        ("selective", "checkpoint(context_fn=...) in the forward is not supported"),
        ("nested", "checkpoint within a checkpointed call is not supported"),
        ("on cpu", "save_on_cpu in the forward: hooks for saved tensors are not supported"),
    ],
)
def test_what_a_graph_cannot_do_is_refused(two_ranks: Pool, way: str, said: str) -> None:
    for reply in two_ranks.run(jobs.ways, way):
        assert said in reply


@pytest.mark.thin(3)
@pytest.mark.parametrize("way", ["autocast", "detached", "harmless"])
def test_what_a_graph_does_as_the_module(two_ranks: Pool, way: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 8, 8)
    model = jobs.Ways(way)
    loss = model(x)
    loss.backward()
    if way == "autocast":
        assert abs(loss - jobs.Ways("plain")(x)) > 1e-3
    for got, grads in two_ranks.run(jobs.ways, way):
        assert got == pytest.approx(loss.item(), abs=1e-4)
        for n, (grad, parameter) in enumerate(zip(grads, model.parameters(), strict=True)):
            if parameter.grad is None:
                assert grad is None or not grad.any()
            else:
                # Of bf16 each rank rounds its part of the sum over tokens.
                scale = parameter.grad.abs().max() if way == "autocast" else 1.0
                assert_same(f"parameter {n}", grad / scale, parameter.grad / scale, 1e-2)
