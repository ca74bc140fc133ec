"""Annotated ops on DTensors that lie as a user put them: equal to one process, and where."""

from __future__ import annotations

from typing import Any

import dtensor_jobs
import pytest
import torch
from ranks import Pool

from .dtensor_cases import MATMUL, check


def wanted(name: str, shapes: Any) -> list[torch.Tensor]:
    """Results and gradients of a user's op in plain torch."""
    inputs, douts = dtensor_jobs.user_inputs(name, shapes)
    leaves = [t.requires_grad_() for t in inputs]
    match name:
        case "matmul":
            results = [leaves[0] @ leaves[1]]
        case "two":
            results = [leaves[0] * 2 + sum(leaves[2:]), leaves[0].sum(1)[:, None] * leaves[1]]
        case "column_max":
            results = [leaves[0].amax(0) * leaves[1]]
        case "scale_groups":
            results = [leaves[0] * leaves[1].repeat_interleave(3)]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, douts)]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("shapes", "places", "lie"),
    [
        (MATMUL, ["R", "R"], "R R R"),
        # a replicated input of a split op gets a part of its gradient from each rank
        (MATMUL, ["0", "R"], "0 0 P"),
        (MATMUL, ["R", "1"], "1 P 1"),
        (MATMUL, ["1", "0"], "P 1 0"),
        # the other input is brought to where the annotation says
        (MATMUL, ["1", "R"], "P 1 0"),
        (MATMUL, ["R", "0"], "P 1 0"),
        # partial sums are summed before the op
        (MATMUL, ["P", "1"], "1 P 1"),
        (MATMUL, ["P", "P"], "R R R"),
        # uneven, and a rank with nothing
        (((5, 7), (7, 3)), ["0", "R"], "0 0 P"),
        (((5, 7), (7, 3)), ["1", "0"], "P 1 0"),
        (((1, 7), (7, 1)), ["0", "R"], "0 0 P"),
        (((4, 1), (1, 3)), ["1", "0"], "P 1 0"),
    ],
)
def test_user_op(two_ranks: Pool, shapes: Any, places: list[str], lie: str) -> None:
    check(
        two_ranks.run(dtensor_jobs.user_op, "matmul", shapes, places),
        lie,
        wanted("matmul", shapes),
    )


def test_results_are_really_cut(two_ranks: Pool) -> None:
    def local(places: list[str], shapes: Any = MATMUL) -> list[Any]:
        return [r[2] for r in two_ranks.run(dtensor_jobs.user_op, "matmul", shapes, places)]

    assert local(["0", "R"]) == [[(2, 8)]] * 2
    assert local(["1", "R"]) == [[(4, 8)]] * 2
    assert local(["R", "1"], ((4, 6), (6, 7))) == [[(4, 4)], [(4, 3)]]


@pytest.mark.parametrize(
    ("shapes", "places", "lie"),
    [
        (((4, 6), (3,)), ["0", "R"], "0 0 0 P"),
        # the first result is whole on every rank; its gradient counts once
        (((4, 6), (3,)), ["R", "0"], "R 1 P 0"),
        # a tensor that is not annotated is whole on every rank
        (((4, 6), (3,), (1,)), ["0", "R", "R"], "0 0 0 P P"),
        (((4, 6), (3,), (1,)), ["0", "R", "0"], "0 0 0 P P"),
    ],
)
def test_two_results(two_ranks: Pool, shapes: Any, places: list[str], lie: str) -> None:
    replies = two_ranks.run(dtensor_jobs.user_op, "two", shapes, places)
    check(replies, lie, wanted("two", shapes))


def test_a_result_that_the_annotation_leaves_open(two_ranks: Pool) -> None:
    shapes = ((4, 6), (1,))
    replies = two_ranks.run(dtensor_jobs.user_op, "column_max", shapes, ["R", "R"])
    check(replies, "R R R", wanted("column_max", shapes))


@pytest.mark.parametrize(
    ("groups", "places", "lie"),
    [
        (4, ["1", "R"], "1 1 0"),  # the first alternative: w is brought
        (4, ["1", "0"], "1 1 0"),
        (4, ["0", "R"], "0 0 P"),
        (3, ["1", "R"], "1 1 P"),  # the second: whole groups cannot be dealt out
        (1, ["1", "R"], "1 1 P"),
    ],
)
def test_alternatives(two_ranks: Pool, groups: int, places: list[str], lie: str) -> None:
    shapes = ((4, 3 * groups), (groups,))
    replies = two_ranks.run(dtensor_jobs.user_op, "scale_groups", shapes, places)
    check(replies, lie, wanted("scale_groups", shapes))


@pytest.mark.slow
def test_alternatives_on_two_axes(four_ranks: Pool) -> None:
    shapes = ((4, 9), (3,))
    for places, lie in ((["01", "RR"], "01 01 PP"), (["10", "RR"], "10 10 PP")):
        replies = four_ranks.run(dtensor_jobs.user_op, "scale_groups", shapes, places, (2, 2))
        check(replies, lie, wanted("scale_groups", shapes))


def test_user_op_on_two_axes(four_ranks: Pool) -> None:
    for places, lie in (
        (["01", "R0"], "0P 01 P0"),
        (["0R", "R1"], "01 0P P1"),
        (["1R", "01"], "P1 1P 01"),
        (["R0", "RR"], "R0 R0 RP"),
    ):
        replies = four_ranks.run(dtensor_jobs.user_op, "matmul", MATMUL, places, (2, 2))
        check(replies, lie, wanted("matmul", MATMUL))


def wanted_means(name: str, shapes: Any, used: tuple[int, ...]) -> list[torch.Tensor]:
    """Results and gradients of the ops around a mean over tokens, in plain torch."""
    inputs, douts = dtensor_jobs.user_inputs(name, shapes)
    leaves = [t.requires_grad_() for t in inputs]
    m = leaves[0].mean(1)
    results = [m] if name == "mean" else [(leaves[0] - m[:, None]) * leaves[1], m * leaves[1]]
    grads = torch.autograd.grad([results[n] for n in used], leaves, [douts[n] for n in used])
    return [*(r.detach() for r in results), *grads]


CENTRED = ("centred", "centred by shares", "centred by wholes")


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CENTRED)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_of_what_a_communicating_split_leaves_whole(
    two_ranks: Pool, name: str, used: tuple[int, ...]
) -> None:
    """The gradient of the mean counts once, whoever of the ranks computes it."""
    shapes = ((2, 5, 3), (3,))
    want = wanted_means(name, shapes, used)
    for places, lie in ((["1", "R"], "1 R 1 P"), (["0", "R"], "0 0 0 P"), (["R", "R"], "R R R R")):
        replies = two_ranks.run(dtensor_jobs.user_op, name, shapes, places, (2,), used)
        check(replies, lie, want)


def test_gradients_of_the_only_result_that_is_whole(two_ranks: Pool) -> None:
    """No input is whole; what the backward adds up, it adds up inside."""
    want = wanted_means("mean", ((2, 5, 3),), (0,))
    check(two_ranks.run(dtensor_jobs.user_op, "mean", ((2, 5, 3),), ["1"]), "R 1", want)


def test_gradients_of_what_is_whole_along_one_of_two_axes(four_ranks: Pool) -> None:
    for name in CENTRED:
        shapes = ((2, 5, 3), (3,))
        want = wanted_means(name, shapes, (0, 1))
        for places, lie in ((["01", "RR"], "01 0R 01 PP"), (["1R", "RR"], "1R RR 1R PR")):
            replies = four_ranks.run(dtensor_jobs.user_op, name, shapes, places, (2, 2))
            check(replies, lie, want)
