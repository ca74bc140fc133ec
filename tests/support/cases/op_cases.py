"""Cases of the attention ops (see ``customized_ops.ring_attention.fuzz.kinds.attention``), and what
they must be over in-process ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dense import assert_same
from torch import Tensor

from customized_ops.ring_attention import run_ranks
from customized_ops.ring_attention.fuzz.kinds.attention import DENSE_OPS, SEED, Case

__all__ = [
    "DENSE_OPS",
    "NAMES",
    "SEED",
    "Case",
    "check_dense",
    "check_rounding",
    "cut",
    "expected",
    "gather",
    "run_rank",
    "same",
]

run_rank, gather, expected = Case.run_rank, Case.gather, Case.expected
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")  # of results, as many as a case has


def cut(case: Case, ranks: int) -> list[Tensor]:
    """Whole results of a case over in-process ranks."""
    return gather(case, run_ranks(ranks, lambda comm: run_rank(case, comm.rank, ranks, comm)))


def same(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    """All results are the same."""
    for name, (a, b) in zip(NAMES, zip(got, want, strict=True), strict=False):
        assert_same(name, a, b, tolerance)


def check_dense(case: Case, ranks: int) -> None:
    """out, lse and all gradients over in-process ranks equal dense attention's to 1e-10."""
    same(cut(case, ranks), expected(case))


def check_rounding(case: Case, ranks: int) -> None:
    """Error against fp64 at most twice the single device's in low precision, plus rounding of the
    result; that of a sink's gradient, which ranks add up, once for every rank."""
    exact, alone, many = expected(case), run_rank(case, 0, 1, None), cut(case, ranks)
    for name, truth, one, all_ in zip(NAMES, exact, alone, many, strict=False):
        error_one, error_all = ((x.double() - truth).abs().max() for x in (one, all_))
        rounding = torch.finfo(all_.dtype).eps * truth.abs().max()
        bound = 2 * error_one + rounding * (ranks if name == "dsink" else 1)
        assert error_all <= bound, (name, error_one, error_all)
