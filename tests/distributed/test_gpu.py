"""All ops in fp64 on GPUs: one device, and ranks over NCCL and over symmetric memory."""

from __future__ import annotations

from dataclasses import replace

import group_jobs
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


@pytest.mark.parametrize("by_torch", [None, 1])
@worlds()
def test_messages_by_functions_of_nccl(ranks: Pool, by_torch: int | None) -> None:
    """A rank on which torch passes them is understood; an aborted group is an error, no crash."""
    hosts = "2x2" if ranks.size == 4 else ""
    for rank, (called, came, error) in enumerate(
        ranks.run(group_jobs.messages_by_nccl, by_torch, hosts)
    ):
        assert called == (rank != by_torch)
        sent = [100 * peer for peer in range(ranks.size) if peer != rank for _ in range(2)]
        assert came == [sent, [n + 1 for n in sent]]
        assert error != "nothing"
