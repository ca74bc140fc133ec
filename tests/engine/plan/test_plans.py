"""Plans of several kinds on real ranks: the same loss and gradients as one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import engine_jobs
import planning_jobs
import pytest
import torch
import verification_jobs
from dense import assert_same
from planning_jobs import SLOW
from ranks import Pool, worlds
from steps import assert_gradients

CUT = {"rates": SLOW}


def check(
    pool: Pool,
    policy: Any,
    shape: tuple[int, ...],
    length: int,
    layers: int,
    told: dict[str, Any],
    batch: int = 1,
    lowered: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare with one process to 1e-10; returns parameters in parts, and the plan."""
    plan = math.prod(shape)
    model, losses = engine_jobs.alone("ring", pool.size // plan, batch, length, layers)
    given = policy, shape, length, layers, told, batch, lowered
    replies = pool.run(planning_jobs.step, *given)
    for rank, (loss, grads, _, _) in enumerate(replies):
        assert abs(loss - losses[rank // plan]) < 1e-10
        assert_gradients(f"rank {rank}", grads, model)
    return replies[0][2], json.loads(replies[0][3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "split", "in_parts"),
    [("tp", "g", True), ("ulysses", "g", False), ("auto", None, False)],
)
def test_two_ranks(two_ranks: Pool, policy: str, split: str | None, in_parts: bool) -> None:
    """Heads are cut in "hybrid" below too, and parameters in ``test_parts.py``."""
    lying, plan = check(two_ranks, policy, (2,), 33, 1, CUT)
    assert bool(lying) == in_parts or policy == "auto"
    assert split in (None, plan["splits"]["ring_attn"])
    assert any(op["split"][0] or "S" in str(op["inputs"]) for op in plan["ops"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "splits"), [("cp", {"l"}), ("dp", {"b"}), ("ulysses", {"g", "h", "qh"})]
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@worlds(cpus=[4], gpus=[4])
def test_forced_on_four(ranks: Pool, shape: tuple[int, ...], policy: str, splits: set[str]) -> None:
    """On all ranks in a row and on two axes."""
    _, plan = check(ranks, policy, shape, 30, 1, {}, batch=4)
    found = plan["splits"]["ring_attn"]
    assert splits & ({found} if isinstance(found, str) else set(found))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("policy", "shape", "told", "lowered"),
    [
        pytest.param("hybrid", (2, 2), {}, False, marks=pytest.mark.slow),
        pytest.param("tp", (2, 2), {}, True, marks=pytest.mark.slow),
        pytest.param("auto", (2, 2), CUT, True, marks=pytest.mark.slow),
        pytest.param("auto", (4,), CUT | {"memory_bytes": 2.1e5}, True, marks=pytest.mark.slow),
        # Two copies of the model, each in parts.
        ("tp", (2,), {}, False),
        pytest.param("tp", (2,), {}, True, marks=pytest.mark.slow),
        # Heads of q alone beside the sequence; a parameter in parts, gathered where it is read.
        pytest.param(
            {"blocks.*.attention": ("l", "qh"), "*.gate.weight": (0, 1), "cos": "whole"},
            (2, 2),
            {},
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
@worlds(cpus=[4], gpus=[4])
def test_four_ranks(
    ranks: Pool, policy: Any, shape: tuple[int, ...], told: dict[str, Any], lowered: bool
) -> None:
    """30 tokens in uneven parts of uneven parts. "hybrid" is lowered on two ranks, and so are
    parameters in parts, in ``test_parts.py``."""
    lying, plan = check(ranks, policy, shape, 30, 1, told, lowered=lowered)
    attention = plan["splits"]["ring_attn"]
    if policy == "hybrid":
        assert attention == ["l", "g"] and not lying
        assert plan["ops"]["linear"]["inputs"][0] == "S1,S1"
    if policy == "tp":
        assert "blocks.0.gate.weight" in lying
    if isinstance(policy, dict):
        assert attention == ["l", "qh"]
        assert lying == {"blocks.0.gate.weight": ("(Shard(dim=0), Shard(dim=1))", (24, 16))}
    if "memory_bytes" in told:
        assert lying and sum(plan["held"].values()) <= told["memory_bytes"]


@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        pytest.param("cp", (4,), marks=pytest.mark.slow),
        pytest.param("tp", (4,), marks=pytest.mark.slow),
        pytest.param("hybrid", (2, 2), marks=pytest.mark.slow),
    ],
)
def test_counted_bytes_are_the_planned_ones(
    four_ranks: Pool, policy: str, shape: tuple[int, ...]
) -> None:
    """Between ops, and inside attention; of the rank that receives most."""
    replies = four_ranks.run(planning_jobs.received, policy, shape)
    counted = [max(reply[0][n] for reply in replies) for n in range(4)]
    assert counted == replies[0][1]
    assert sum(counted) > 0


@pytest.mark.slow
def test_plans_given_back(two_ranks: Pool, tmp_path: Path) -> None:
    replies = two_ranks.run(planning_jobs.replayed, str(tmp_path / "plan.json"))
    assert replies[0] == replies[1]
    first, said = replies[0]
    assert said["file"] == first
    assert json.loads(said["first layer open"])["splits"]["ring_attn_1"] == "l"
    assert said["heads"].startswith(
        "PolicyError: the plan has ring_attn as OpPlacements(split=('hd',)"
    )
    assert "R R R -> R R\n" in said["heads"] and "(split l)" in said["heads"]
    assert said["at odds"].startswith(
        "PolicyError: the plan's splits have ring_attn on ('g',), and its ops on ('l',)"
    )
    assert said["no op"] == ("PolicyError: the plan splits attention, which is no op of the graph")
    assert said["another graph"] == (
        "PolicyError: the plan is for another module, or for inputs of other shapes"
    )


def test_a_parameter_of_two_names_in_parts(two_ranks: Pool) -> None:
    """It stays one; and the module can be captured again though no rank has it whole."""
    model = planning_jobs.Tied()
    loss = model(torch.arange(12).view(2, 6))
    loss.backward()
    for grad, in_parts, again, names in two_ranks.run(planning_jobs.tied):
        assert in_parts and names == ["embed.weight", "head.weight"]
        assert abs(again - loss.item()) < 1e-10
        assert_same("weight", grad, model.embed.weight.grad)


@pytest.mark.thin(2)
@pytest.mark.parametrize("smaller", [False, True])
def test_verify(two_ranks: Pool, smaller: bool) -> None:
    assert two_ranks.run(verification_jobs.verified, False, smaller) == ["the same"] * 2
    first, second = two_ranks.run(verification_jobs.verified, True, smaller)
    assert first == second
    assert first.startswith(
        "VerificationError: the parallel module differs from the one alone; "
        "rank 0: the gradient of bad.weight differs by up to "
    )


def test_verify_names_the_op_that_is_annotated_wrongly(two_ranks: Pool) -> None:
    right = two_ranks.run(verification_jobs.verified_annotation, {"running_sum": "b"})
    assert right == ["no error"] * 2
    first, second = two_ranks.run(verification_jobs.verified_annotation, {"running_sum": "l"})
    assert first == second
    found = first.rpartition("; of ")[2]
    assert found.startswith("running_sum (running_sum in the module) by itself result 0 differs")


@pytest.mark.parametrize(
    "op",
    ["loss", *(pytest.param(n, marks=pytest.mark.slow) for n in ("recurrent", "ring", "varlen"))],
)
def test_verify_of_ops_that_are_right(two_ranks: Pool, op: str) -> None:
    for said in two_ranks.run(verification_jobs.verified_ops, op):
        assert " the gradient of " in said and said.endswith("; each op by itself is right")


@pytest.mark.thin(2)
@pytest.mark.parametrize("policy", ["auto", {"head.weight": 0}])
def test_verify_with_whole_numbers(two_ranks: Pool, policy: Any) -> None:
    assert two_ranks.run(verification_jobs.verified_integers, policy) == [True] * 2


@pytest.mark.slow
def test_calibrate(two_ranks: Pool, tmp_path: Path) -> None:
    replies = two_ranks.run(planning_jobs.calibrated, str(tmp_path))
    assert replies[0][1] == replies[1][1]
    for unknown, found, known, there, text in replies:
        assert not unknown.calibrated and there
        assert found == known and found.calibrated
        speeds = found.matmul_flops_per_second, found.memory_bytes_per_second
        assert all(speed > 1e6 for speed in speeds)
        assert len(found.links) == 2 and all(link.bytes_per_second > 0 for link in found.links)
        assert "(measured rates)" in text


def test_a_plans_file_is_read_on_one_rank(two_ranks: Pool, tmp_path: Path) -> None:
    said = two_ranks.run(planning_jobs.a_file_that_only_rank_0_has, str(tmp_path))
    assert said == [["True", "FileNotFoundError", "PolicyError"]] * 2


def test_constants_are_the_same_on_all_ranks(two_ranks: Pool) -> None:
    policy = {"linear.weight": 0}  # so that it is captured twice, once without data
    loss = verification_jobs.Scaled(2.0)(torch.ones(4, 6, 2, dtype=torch.float64)).item()
    for losses in two_ranks.run(verification_jobs.constants, policy, False):
        assert losses == pytest.approx((loss, loss), rel=1e-12)
    first, second = two_ranks.run(verification_jobs.constants, policy, True)
    assert first == second
    assert first.startswith("CaptureError: the ranks' captured graphs must be the same, but differ")
    assert first.count("rank 1 (2,) torch.float64 #") == 1
