"""Calls over ranks in equal parts."""

from __future__ import annotations

from op_cases import Case, gather, run_rank
from torch import Tensor

from customized_ops.ring_attention import run_ranks

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def cut(case: Case, ranks: int) -> list[Tensor]:
    """Whole results of the case over in-process ranks."""
    return gather(case, run_ranks(ranks, lambda comm: run_rank(case, comm.rank, ranks, comm)))
