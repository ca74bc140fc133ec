"""The chunked loss with tokens and vocabulary cut: ranks in one process, gloo, DTensor, engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import loss_jobs
import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import WHOLE, LossCase, Place, assemble, check, expected, parts_of, run_grid
from ranks import Pool

from customized_ops.ring_attention.core.comm.inprocess import run_ranks

CASE = LossCase((2, 12), vocab=13, bias=True, softcap=2.0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ignored", ["none", "some", "all", "but last"])
def test_tokens_in_process(ranks: int, ignored: str) -> None:
    for reduction in ("mean", "sum", "none"):
        case = replace(CASE, ignored=ignored, reduction=reduction)
        check(f"{ranks} ranks, {case}", case, run_grid(case, ranks, 1))


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [16, 13, 9, 3, 1])
def test_vocabulary_in_process(ranks: int, vocab: int) -> None:
    """Even, uneven, and with ranks that hold nothing: 9 rows over 8 ranks leave 3 empty."""
    for reduction in ("mean", "none"):
        case = replace(CASE, vocab=vocab, reduction=reduction, chunk_size=5)
        check(f"{ranks} ranks, {case}", case, run_grid(case, 1, ranks))


@pytest.mark.parametrize("barred", [1, 4, 8, 12])
@pytest.mark.parametrize("targets", [False, True])
def test_logits_of_minus_infinity(barred: int, targets: bool) -> None:
    """Of 13 rows on 4 ranks: one rank has no other logits, then two, then three."""
    case = replace(CASE, softcap=0.0, barred=barred, barred_targets=targets, reduction="none")
    check(f"{case}", case, run_grid(case, 1, 4))


def test_tokens_with_no_other_logit_on_any_rank() -> None:
    case = replace(CASE, softcap=0.0, barred=13, barred_targets=True, reduction="none")

    def call(comm: Any) -> Any:
        given, _, where = parts_of(case, WHOLE, Place(comm.rank, 2, comm))
        return case.call(*given, **where)

    for loss, lse in run_ranks(2, call):
        assert lse.isneginf().all()
        assert torch.equal(loss.isnan(), case.tensors()[2] != case.ignore_index)


@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 3)])
def test_both_in_process(grid: tuple[int, int]) -> None:
    for reduction in ("mean", "sum", "none"):
        for ignored in ("some", "but last"):
            case = replace(CASE, tokens=(2, 11), reduction=reduction, ignored=ignored)
            check(f"{grid}, {case}", case, run_grid(case, *grid))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    tokens=st.tuples(st.integers(1, 2), st.integers(1, 9)),
    vocab=st.integers(1, 10),
    ignored=st.sampled_from(["none", "some", "all", "but last"]),
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    chunk_size=st.one_of(st.none(), st.integers(1, 6)),
)
def test_any_grid(grid: tuple[int, int], **options: Any) -> None:
    case = LossCase(**options)
    check(f"{grid}, {case}", case, run_grid(case, *grid))


def test_chunks_of_their_own_on_each_rank() -> None:
    """Nothing is sent inside the loop over chunks, so ranks may differ in it."""
    case = replace(CASE, vocab=9, chunk_size=None)
    check("no chunk size", case, run_grid(case, 1, 4))


def gathered(case: LossCase, grid: tuple[int, int], flat: list[Any]) -> list[torch.Tensor]:
    rows, columns = grid
    return assemble(case, [flat[i * columns :][:columns] for i in range(rows)])


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_two_processes(two_ranks: Pool, grid: tuple[int, int]) -> None:
    check("gloo", CASE, gathered(CASE, grid, two_ranks.run(loss_jobs.grid_part, CASE, grid)))


@pytest.mark.parametrize("grid", [(4, 1), (1, 4), (2, 2)])
def test_four_processes(four_ranks: Pool, grid: tuple[int, int]) -> None:
    for case in (CASE, replace(CASE, vocab=3), replace(CASE, ignored="but last")):
        check("gloo", case, gathered(case, grid, four_ranks.run(loss_jobs.grid_part, case, grid)))


# places of hidden, weight, target, bias; where lie loss, lse, dhidden, dweight, dbias
SUMMED = LossCase((2, 6), vocab=7, bias=True, reduction="sum")
EACH = replace(SUMMED, reduction="none")
MEAN = replace(SUMMED, reduction="mean", ignored="but last")


@pytest.mark.parametrize(
    ("case", "places", "lie"),
    [
        (EACH, "R R R R", "R R R R R"),
        (EACH, "1 R 1 R", "1 1 1 P P"),
        (EACH, "0 R 0 R", "0 0 0 P P"),
        (EACH, "R 0 R 0", "R R P 0 0"),
        (EACH, "R 0 R R", "R R P 0 0"),  # the bias is brought to the weight
        (EACH, "1 R R R", "1 1 1 P P"),
        (SUMMED, "1 R 1 R", "P 1 1 P P"),
        (SUMMED, "R 0 R 0", "R R P 0 0"),
        (replace(SUMMED, vocab=1), "R 0 R 0", "R R P 0 0"),  # the second rank has no row
        (replace(SUMMED, tokens=(3, 1)), "1 R 1 R", "P 1 1 P P"),  # nor token
        (replace(EACH, tokens=(5,)), "0 R 0 R", "0 0 0 P P"),
    ],
)
def test_dtensor(two_ranks: Pool, case: LossCase, places: str, lie: str) -> None:
    for rank, (shown, wholes, _) in enumerate(
        two_ranks.run(loss_jobs.dtensor_loss, case, places.split(), (2,))
    ):
        assert " ".join(shown) == lie, f"rank {rank}"
        check(f"rank {rank}", case, wholes)


@pytest.mark.parametrize("places", ["1 R 1 R", "0 R 0 R", "R 0 R 0"])
def test_the_mean_on_dtensors(two_ranks: Pool, places: str) -> None:
    for _, wholes, _ in two_ranks.run(loss_jobs.dtensor_loss, MEAN, places.split(), (2,)):
        check("mean", MEAN, wholes)


@pytest.mark.parametrize("places", ["1R R0 1R R0", "R1 0R R1 0R", "01 RR 01 RR", "R0 0R R0 0R"])
def test_dtensor_on_two_axes(four_ranks: Pool, places: str) -> None:
    for case in (MEAN, EACH, replace(MEAN, vocab=5, tokens=(3, 5), ignored="some")):
        for _, wholes, _ in four_ranks.run(loss_jobs.dtensor_loss, case, places.split(), (2, 2)):
            check(places, case, wholes)


@pytest.mark.thin(8)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("split", ["l", "v", "b", "cp", "dp"])
def test_training_in_the_engine(two_ranks: Pool, split: str, reduction: str) -> None:
    model, losses = loss_jobs.trained_alone(reduction)
    for rank, (got, parameters, plan) in enumerate(
        two_ranks.run(loss_jobs.trained_parallel, reduction, split)
    ):
        identifier = {"cp": "l", "dp": "b"}.get(split, split)
        row = next(line for line in plan.splitlines() if "chunk_linear_cross_entropy" in line)
        assert row.split()[2:5] == [identifier, "/", "2"], plan
        torch.testing.assert_close(got, losses, rtol=0, atol=1e-10)
        for name, parameter in model.named_parameters():
            assert_same(f"rank {rank}, {name}", parameters[name], parameter)
    assert losses[0] - losses[-1] > 1e-3, "a model that does not learn compares nothing"


def test_all_reduce_over_gloo(four_ranks: Pool) -> None:
    given, totals, largest = zip(*four_ranks.run(loss_jobs.all_reduced), strict=True)
    for total, most in zip(totals, largest, strict=True):
        torch.testing.assert_close(total, torch.stack(given).sum(0))
        assert torch.equal(most, torch.stack(given).amax(0))


def test_counted_bytes_are_the_planned_ones(two_ranks: Pool) -> None:
    """Each token has three numbers of 8 bytes, of which a ring of two receives half twice."""
    for counted, forward, backward in two_ranks.run(loss_jobs.counted_and_planned_bytes):
        assert (counted, backward) == (forward, 0)
        assert counted == 3 * 8 * loss_jobs.samples()["targets"].numel()


def test_the_case_of_the_mean_is_uneven() -> None:
    """All tokens that count are the second rank's, so a mean of means would be wrong."""
    target = MEAN.tensors()[2]
    assert (target[:, :3] == -100).all() and (target[:, 3:] != -100).any()
    assert expected(MEAN)[0] > 0
