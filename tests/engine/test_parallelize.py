"""The embedded engine on real ranks: same loss and gradients as one process."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import engine_jobs
import pytest
import torch
from dense import assert_same
from ranks import Pool, worlds
from torch.optim.swa_utils import AveragedModel

from annotations import ComputeConfig, parallelize

PARALLEL = parallelize(torch.nn.Linear(3, 3), {}, "cp", ComputeConfig(1, 1))


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
    copies = pool.size // plan
    model = engine_jobs.tiny_llama(op, layers)
    losses = []
    for n in range(copies):
        loss = model(**engine_jobs.sample(op, batch, length, seed=1 + n))
        (loss / copies).backward()
        losses.append(loss.item())
    given = op, policy, plan, batch, length, layers, lowered
    replies = pool.run(engine_jobs.loss_and_gradients, *given)
    for rank, (loss, grads, _) in enumerate(replies):
        assert abs(loss - losses[rank // plan]) < 1e-10
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().max() > 1e-6, "a gradient of nothing compares nothing"
            assert_same(f"rank {rank}, {name}", grads[name], parameter.grad)
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


WRONG_SPLIT = """\
PartitionError: wrap_ring_attn_func: 'hd' cannot be split
    b l h hd^, b l h hd^, b l h vd^ -> b l h vd^, b h l
          ^~~
    it is marked frozen: 'hd^'
    can be split over 2 ranks: 'b', 'l', 'h'
    asked for by policy '<lambda>' for ring_attn in the module"""


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no attention", "PolicyError: policy 'cp' has nothing to split: no op that communicates"),
        ("unknown policy", "PolicyError: pas_policy 'diagonal' is unknown; known: cp, dp"),
        ("wrong split", WRONG_SPLIT),
        ("too few to split", "cannot be split on b ('b' = 1) over 2 ranks; it can on: l, h"),
        ("unknown op", "PolicyError: the policy names attn, but the annotated ops are: ring_attn"),
        ("batch of one", "policy 'dp': ring_attn (wrap_ring_attn_func in the module) cannot"),
        ("packed dp", "cannot be split on b over 2 ranks; it can on: l, g, qh"),
        ("wrong ranks", "ValueError: parallelize: runtime_ngpus=3, but the world has 2 ranks"),
        ("one rank", "ValueError: parallelize: runtime_ngpus=1, but the world has 2 ranks"),
        ("value", "CaptureError: the module decides by a tensor's value, as of .item()"),
        ("wrong arguments", "CaptureError: dummy_forward_args do not fit Plain.forward: missing"),
        (
            "examples of their own",
            "CaptureError: the ranks' example arguments must be the same, but differ\n"
            "    x: rank 0 (2, 8, 8) torch.float32, rank 1 (2, 10, 8) torch.float32",
        ),
        ("noise", "draws random numbers, which is not supported yet"),
        ("buffer", "CaptureError: the module changes 'seen' in its forward"),
    ],
)
def test_refusals_reach_every_rank(two_ranks: Pool, what: str, message: str) -> None:
    said = two_ranks.run(engine_jobs.refused, what)
    assert said[0] == said[1]
    assert message in said[0]


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        ("configs of their own", "compute_config.plan_ngpus: rank 0 2, rank 1 1"),
        ("policies of their own", "pas_policy: rank 0 'cp', rank 1 'dp'"),
        (
            "hoists of their own",
            "compute_config.pas_config: rank 0 {'hoist': False}, rank 1 {'hoist': True}",
        ),
        ("modules of their own", "parameter bias: rank 0 (8,) torch.float32, rank 1 none"),
        ("verified by rank 1", "verify: rank 0 False, rank 1 True"),
        (
            "no data on rank 1",
            "parameter weight: rank 0 (8, 8) torch.float32, "
            "rank 1 (8, 8) torch.float32 without data",
        ),
    ],
)
def test_ranks_must_ask_for_the_same(two_ranks: Pool, what: str, differs: str) -> None:
    said = two_ranks.run(engine_jobs.refused, what)
    first = "CaptureError: the ranks' calls of parallelize must be the same, but differ"
    assert said == [f"{first}\n    {differs}"] * 2


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("unknown policy", "PolicyError: pas_policy 'diagonal' is unknown"),
        ("field", "NotImplementedError: ComputeConfig: use_zero=1 is not supported"),
        ("mesh", "ValueError: ComputeConfig: pas_config['mesh_shape']=(3,) must be counts"),
        ("option", "ValueError: parallelize: compile=True needs lowered=True"),
        ("class", "NotImplementedError: parallelize: module classes are not supported yet"),
        ("list", "TypeError: parallelize: dummy_forward_args must map"),
        ("name", "CaptureError: dummy_forward_args do not fit Plain.forward: missing"),
        ("verify", "CaptureError: verify's arguments do not fit Plain.forward: missing"),
        ("dtype", "TypeError: parallelize: module_dtype must be a torch.dtype or None, got 'bf16'"),
        ("lazy parameter", "RuntimeError: Can't access the shape of an uninitialized parameter"),
    ],
)
def test_what_one_rank_refuses_reaches_the_other(two_ranks: Pool, what: str, why: str) -> None:
    first, second = two_ranks.run(engine_jobs.refused, f"{what} of rank 1")
    assert second.startswith(why)
    assert first.startswith("CaptureError: calls of parallelize: refused on another rank")
    assert f"rank 1: {why.split(': ', 1)[1]}" in first


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"config": ComputeConfig(1, 1, pas_config={"mesh_shape": (2,)})}, "must be counts of"),
        ({"policy": None}, "pas_policy None is unknown; known: cp, dp"),
        ({"compute_dtype": "bf16"}, "compute_dtype must be a torch.dtype or None, got 'bf16'"),
        ({"module": torch.nn.Sequential(PARALLEL)}, "is parallelized already"),
        ({"config": ComputeConfig(2, 2), "example": []}, "dummy_forward_args must map"),
        ({"config": ComputeConfig(2, 2)}, "torch.distributed is not initialised"),
    ],
)
def test_what_is_refused_of_one_rank(given: dict[str, Any], why: str) -> None:
    """Though one rank plans nothing, and before anything is asked of others that are not there."""
    wanted = {"example": {"x": torch.zeros(2, 8, 8)}, "policy": "cp", "config": ComputeConfig(1, 1)}
    module = given.pop("module", engine_jobs.Plain("fine"))
    options = {name: given.pop(name) for name in list(given) if name not in wanted}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(why)):
        parallelize(module, *(wanted | given).values(), **options)


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps, AveragedModel])
def test_a_parallel_module_is_not_copied(use: Callable[[Any], Any]) -> None:
    with pytest.raises(NotImplementedError, match="cannot be copied or pickled: copy"):
        use(PARALLEL)


@pytest.mark.parametrize("said", [True, False])
def test_ranks_of_a_copy_must_pass_one_batch(two_ranks: Pool, said: bool) -> None:
    """Ranks on CPUs compare them though nobody said so."""
    first, second = two_ranks.run(engine_jobs.batches_of_their_own, said)
    assert first == second
    text = re.sub("#[0-9a-f]{8}", "#", first)
    assert text == (
        "CaptureError: the ranks' batches of one copy must be the same, but differ\n"
        "    x: rank 0 (2, 8, 8) torch.float32 #, rank 1 (2, 8, 8) torch.float32 #"
    )


def test_inputs_that_differ_from_the_example(two_ranks: Pool) -> None:
    said = two_ranks.run(engine_jobs.called_wrongly)
    assert said[0] == said[1]
    assert [line.split(":")[0] for line in said[0]] == ["CaptureError"] * 4
    assert "x: expected (2, 8, 8) torch.float32 as in dummy_forward_args, got (2, 9)" in said[0][0]


def test_a_dtype_that_makes_ranks_alike(two_ranks: Pool) -> None:
    """What a module was in before does not matter."""
    assert two_ranks.run(engine_jobs.refused, "dtypes of their own, made one") == ["no error"] * 2
    said = two_ranks.run(engine_jobs.refused, "dtypes of their own")
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
    for grads in two_ranks.run(engine_jobs.copies_use_different_parameters):
        for name, parameter in module.named_parameters():
            if name.startswith("unused"):
                assert grads[name] is None
            else:
                assert_same(name, grads[name], parameter.grad, 1e-6)


def test_a_policys_private_error_reaches_every_rank(two_ranks: Pool) -> None:
    said = two_ranks.run(engine_jobs.policy_with_a_private_error)
    assert said == ["Private: not today"] * 2


@pytest.mark.thin(9)
@pytest.mark.parametrize(
    "op",
    [
        "masked",
        "dropout",
        "window",
        "packed window",
        "streaming",
        "shuffled",
        "rolled",
        "rolled uneven",
        "sharded",
    ],
)
def test_the_other_ops(two_ranks: Pool, op: str) -> None:
    model = engine_jobs.EveryOp(op)
    loss = model(**engine_jobs.every_op_inputs(op))
    loss.backward()
    for rank, (got, grads) in enumerate(two_ranks.run(engine_jobs.every_op, op)):
        assert abs(got - loss.item()) < 1e-10
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().max() > 1e-6
            assert_same(f"rank {rank}, {name}", grads[name], parameter.grad)


@pytest.mark.parametrize(
    ("what", "policy", "split"),
    [
        ("heads", engine_jobs.heads_of_q, "qh"),
        ("rows", "cp", "lq"),
        pytest.param("packed rows", "cp", "lq", marks=pytest.mark.slow),
        pytest.param("rows of a cross attention", "cp", "lq", marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2, 4], gpus=[])
def test_parts_of_q(ranks: Pool, what: str, policy: Any, split: str) -> None:
    """Heads where those of k could be cut too, and where not: of four ranks one has none. Rows come
    in uneven parts."""
    model = engine_jobs.PartsOfQ(what)
    loss = model(**engine_jobs.parts_of_q_inputs(what))
    loss.backward()
    for rank, (got, grads, plan) in enumerate(ranks.run(engine_jobs.parts_of_q, what, policy)):
        assert f"{split} / {ranks.size} " in plan
        even = what in ("heads", "packed rows") and ranks.size == 2  # lengths are not known yet
        assert ("nothing" if even else "nothing (imbalance ") in plan
        assert abs(got - loss.item()) < 1e-10
        for name, parameter in model.named_parameters():
            assert parameter.grad.abs().max() > 1e-6
            assert_same(f"rank {rank}, {name}", grads[name], parameter.grad)


@pytest.mark.thin(10)
@pytest.mark.parametrize(
    ("op", "used"),
    [
        (op, used)
        for op in ("centred", "centred by shares", "centred by wholes")
        for used in ((0,), (1,), (0, 1))
    ]
    + [("mean", (0,))],
)
def test_results_that_a_communicating_split_leaves_whole(
    two_ranks: Pool, op: str, used: tuple[int, ...]
) -> None:
    model, given = engine_jobs.Means(op, used), engine_jobs.means_inputs()
    given["x"].requires_grad_()
    loss = model(**given)
    loss.backward()
    for rank, (got, grads, x_grad) in enumerate(two_ranks.run(engine_jobs.means, op, used)):
        assert abs(got - loss.item()) < 1e-10
        assert_same(f"rank {rank}, x", x_grad, given["x"].grad)
        for name, parameter in model.named_parameters():
            assert_same(f"rank {rank}, {name}", grads[name], parameter.grad)


def test_a_named_layout_that_uneven_shards_cannot_have(two_ranks: Pool) -> None:
    """Every rank is told alike, and nothing has been sent."""
    first, second = two_ranks.run(engine_jobs.named_layout_of_uneven_shards)
    assert first == second
    assert "layout zigzag:7:2 gives the ranks [3, 4] tokens, but 7 tokens are cut into [4, 3]" in (
        first
    )


def test_layout_ops_alone_are_cut(two_ranks: Pool) -> None:
    x = torch.arange(2 * 24 * 3, dtype=torch.float64).view(2, 24, 3)
    for plan, result, grad in two_ranks.run(engine_jobs.layout_ops_alone):
        assert ["move_tokens", "3", "l", "/", "2"] in [row.split()[:5] for row in plan.splitlines()]
        assert torch.equal(result, torch.roll(x, -3, 1))
        assert torch.equal(grad, torch.roll(torch.cos(x), 3, 1))


@worlds(cpus=[2], gpus=[])
def test_a_rank_that_comes_late_is_told_of(ranks: Pool) -> None:
    waits, comes = ranks.run(engine_jobs.late, 1.0, "0.2")
    assert comes == []
    assert waits == [
        "rank 0 has waited 0.2 s where ranks compare batches: another rank has not come, or is at "
        "something else"
    ]
    assert ranks.run(engine_jobs.late, 0.1, "5") == [[], []]
