"""Models of the other ops, of parts of q, and of results that a split leaves whole."""

from __future__ import annotations

from typing import Any

import every_op_jobs
import pytest
import refusal_jobs
import torch
from dense import assert_same
from ranks import Pool, worlds
from steps import assert_gradients


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
    model = every_op_jobs.EveryOp(op)
    loss = model(**every_op_jobs.every_op_inputs(op))
    loss.backward()
    for rank, (got, grads) in enumerate(two_ranks.run(every_op_jobs.every_op, op)):
        assert abs(got - loss.item()) < 1e-10
        assert_gradients(f"rank {rank}", grads, model)


@pytest.mark.parametrize(
    ("what", "policy", "split"),
    [
        ("heads", every_op_jobs.heads_of_q, "qh"),
        ("rows", "cp", "lq"),
        pytest.param("packed rows", "cp", "lq", marks=pytest.mark.slow),
        pytest.param("rows of a cross attention", "cp", "lq", marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2, 4], gpus=[])
def test_parts_of_q(ranks: Pool, what: str, policy: Any, split: str) -> None:
    """Heads where those of k could be cut too, and where not: of four ranks one has none. Rows come
    in uneven parts."""
    model = every_op_jobs.PartsOfQ(what)
    loss = model(**every_op_jobs.parts_of_q_inputs(what))
    loss.backward()
    for rank, (got, grads, plan) in enumerate(ranks.run(every_op_jobs.parts_of_q, what, policy)):
        assert f"{split} / {ranks.size} " in plan
        even = what in ("heads", "packed rows") and ranks.size == 2  # lengths are not known yet
        assert ("nothing" if even else "nothing (imbalance ") in plan
        assert abs(got - loss.item()) < 1e-10
        assert_gradients(f"rank {rank}", grads, model)


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
    model, given = every_op_jobs.Means(op, used), every_op_jobs.means_inputs()
    given["x"].requires_grad_()
    loss = model(**given)
    loss.backward()
    for rank, (got, grads, x_grad) in enumerate(two_ranks.run(every_op_jobs.means, op, used)):
        assert abs(got - loss.item()) < 1e-10
        assert_same(f"rank {rank}, x", x_grad, given["x"].grad)
        assert_gradients(f"rank {rank}", grads, model, least=0.0)


def test_a_named_layout_that_uneven_shards_cannot_have(two_ranks: Pool) -> None:
    """Every rank is told alike, and nothing has been sent."""
    first, second = two_ranks.run(every_op_jobs.named_layout_of_uneven_shards)
    assert first == second
    assert "layout zigzag:7:2 gives the ranks [3, 4] tokens, but 7 tokens are cut into [4, 3]" in (
        first
    )


def test_layout_ops_alone_are_cut(two_ranks: Pool) -> None:
    x = torch.arange(2 * 24 * 3, dtype=torch.float64).view(2, 24, 3)
    for plan, result, grad in two_ranks.run(every_op_jobs.layout_ops_alone):
        assert ["move_tokens", "3", "l", "/", "2"] in [row.split()[:5] for row in plan.splitlines()]
        assert torch.equal(result, torch.roll(x, -3, 1))
        assert torch.equal(grad, torch.roll(torch.cos(x), 3, 1))


@worlds(cpus=[2], gpus=[])
def test_a_rank_that_comes_late_is_told_of(ranks: Pool) -> None:
    waits, comes = ranks.run(refusal_jobs.late, 1.0, "0.2")
    assert comes == []
    assert waits == [
        "rank 0 has waited 0.2 s where ranks compare batches: another rank has not come, or is at "
        "something else"
    ]
    assert ranks.run(refusal_jobs.late, 0.1, "5") == [[], []]
