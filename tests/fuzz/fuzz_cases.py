"""Ops that are spoilt on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from customized_ops.ring_attention.fuzz import Case


def spoilt(condition: Callable[[Case, int], bool]) -> Callable[..., Any]:
    """``run_rank`` with dk off by 1e-6 where a condition holds of the case and the ranks."""
    right = Case.run_rank

    def run_rank(case: Case, rank: int, ranks: int, group: Any) -> list[torch.Tensor]:
        results = right(case, rank, ranks, group)
        if condition(case, ranks):
            results[3] = results[3] + 1e-6
        return results

    return run_rank
