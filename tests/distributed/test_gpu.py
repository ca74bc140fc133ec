"""The attention ops on GPUs: one device, and two ranks over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import loss_jobs
import op_jobs
import pytest
import torch
from dense import assert_same
from loss_cases import LossCase, assemble, check
from op_cases import Case, expected, gather, run_rank
from op_table import TABLE, UNEVEN
from ranks import Pool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Pool]:
    """Two NCCL ranks, one GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(2, "nccl", seconds=240)  # a rank that compiles lets the other wait
    yield pool
    pool.close()


@pytest.mark.parametrize("name", TABLE)
def test_one_gpu(name: str) -> None:
    case = replace(TABLE[name], layout=None, device="cuda")
    for got, want in zip(run_rank(case, 0, 1, None), expected(case), strict=True):
        assert_same(name, got.cpu(), want)


def test_two_gpus(two_gpus: Pool) -> None:
    cases = {n: replace(c, device="cuda") for n, c in {**TABLE, **UNEVEN[2]}.items()}
    replies = two_gpus.run(op_jobs.run_cases, list(cases.values()), (0, 1), False)
    for n, (name, case) in enumerate(cases.items()):
        got = gather(case, [reply[n] for reply in replies])
        for a, b in zip(got, expected(case), strict=True):
            assert_same(name, a, b)


@pytest.mark.parametrize("op", ["ring", "zigzag", "varlen"])
def test_bf16_error_is_the_single_gpus_own(two_gpus: Pool, op: str) -> None:
    case = Case(
        op,
        512,
        heads=(8, 2),
        dims=(64, 64),
        cu_seqlens=(0, 200, 512),
        dtype=torch.bfloat16,
        device="cuda",
    )
    alone = run_rank(case, 0, 1, None)
    replies = two_gpus.run(op_jobs.run_cases, [case], (0, 1), False)
    cut = gather(case, [reply[0] for reply in replies])
    for truth, one, many in zip(expected(case), alone, cut, strict=True):
        error_one = (one.cpu().double() - truth).abs().max()
        error_many = (many.double() - truth).abs().max()
        rounding = torch.finfo(many.dtype).eps * truth.abs().max()
        assert error_many <= 2 * error_one + rounding


@pytest.mark.parametrize("cut", ["tokens", "vocabulary"])
def test_chunked_loss_over_two_gpus(two_gpus: Pool, cut: str) -> None:
    case = LossCase((2, 21), vocab=13, bias=True, softcap=2.0, device="cuda")
    replies = two_gpus.run(loss_jobs.grid_part, case, (2, 1) if cut == "tokens" else (1, 2))
    check(cut, case, assemble(case, [[r] for r in replies] if cut == "tokens" else [replies]))
