"""All ops in fp64 on GPUs: one device, and ranks over NCCL and over symmetric memory."""

from __future__ import annotations

from dataclasses import replace

import loss_jobs
import pytest
from dense import assert_same
from loss_cases import LossCase, assemble, check
from op_cases import expected, run_rank
from op_table import TABLE, UNEVEN
from rank_groups import Groups, comms, rows_of, whole
from ranks import Pool, worlds
from verdicts import check as check_ops
from verdicts import on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", TABLE)
def test_one_gpu(name: str) -> None:
    case = replace(TABLE[name], layout=None, device="cuda")
    for got, want in zip(run_rank(case, 0, 1, None), expected(case), strict=True):
        assert_same(name, got.cpu(), want)


@worlds()
def test_every_op(ranks: Pool) -> None:
    cases = on("cuda", {**TABLE, **UNEVEN[ranks.size]})
    check_ops(ranks, [cases], [Groups(whole(ranks.size), comm) for comm in comms(ranks)])


@worlds(gpus=[4])
def test_every_op_over_hosts(ranks: Pool) -> None:
    """As if two GPUs each were on a host: what crosses does so once, and goes on inside."""
    cases = on("cuda", {**TABLE, **UNEVEN[ranks.size]})
    check_ops(ranks, [cases], [Groups(whole(ranks.size), "2,2")])


@pytest.mark.parametrize("cut", ["tokens", "vocabulary", "both"])
@worlds()
def test_chunked_loss(ranks: Pool, cut: str) -> None:
    case = LossCase((2, 21), vocab=13, bias=True, softcap=2.0, device="cuda")
    grid = {"tokens": (ranks.size, 1), "vocabulary": (1, ranks.size)}
    grid["both"] = (2, ranks.size // 2)
    replies = ranks.run(loss_jobs.grid_part, case, grid[cut])
    rows = rows_of(ranks.size, grid[cut][1])
    check(cut, case, assemble(case, [[replies[n] for n in row] for row in rows]))
