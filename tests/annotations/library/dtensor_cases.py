"""What tests of DTensors compare."""

from __future__ import annotations

from typing import Any

import dtensor_jobs
import torch
from dense import assert_same
from op_cases import Case, expected

from customized_ops.ring_attention import AttnMask

MATMUL = ((4, 6), (6, 8))


def check(replies: list[Any], places: str, want: list[torch.Tensor]) -> None:
    """Every rank's whole results equal ``want``; results and gradients lie as ``places`` says."""
    for rank, (shown, wholes, _) in enumerate(replies):
        assert " ".join(shown) == places, f"rank {rank}"
        for n, (a, b) in enumerate(zip(wholes, want, strict=True)):
            assert_same(f"rank {rank}, tensor {n}", a, b)


DENSE = Case("ring", 16, batch=2)


def alone(case: Case) -> list[torch.Tensor]:
    """On one device, of a loss of out and lse; those two are what dense attention gives."""
    want = dtensor_jobs.alone(case)
    for name, got, dense in zip(("out", "lse"), want, expected(case), strict=False):
        assert_same(name, got, dense)
    return want


WHOLE_KEYS = {"q_rows": (0, 1)}
CROSS = Case(
    "masked", 6, given=AttnMask.causal(6, 11), heads=(6, 2), batch=2, sink=True, alibi=True
)
