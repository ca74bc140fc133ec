"""Masks and sizes at the extremes, against dense attention."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from op_cases import Case, check_dense

from customized_ops.ring_attention import AttnMask, Plan, make_plan
from customized_ops.ring_attention.op import call

from .mask_cases import COSTS, cumulative, planned_for

COLUMNS = [(q, q + 5, k, k + 1, -40, 40) for q in range(0, 40, 5) for k in range(q % 3, 40, 7)]
SHORT = [(n, n + 1 + n % 2) for n in range(0, 62, 2)]
MANY = [1 + n % 3 for n in range(1500)]
HALF = AttnMask.causal(12).restrict(q_range=(0, 12), k_range=(0, 12)).restrict((6, 12))


def masked(mask: AttnMask, **options: Any) -> Case:
    return Case("masked", mask.q_len, given=mask, dims=(4, 3), **{"heads": (4, 2), **options})


EXTREMES = {
    "slices one key wide": (4, masked(AttnMask.from_slices(COLUMNS, 40, 40))),
    "ranges shorter than a rank": (
        2,
        masked(AttnMask.from_ranges(SHORT, SHORT[::-1], ["full"] * len(SHORT), 64, 64), sink=True),
    ),
    "1500 documents of 1 to 3 tokens": (
        8,
        masked(AttnMask.varlen(cumulative(MANY), causal=True), heads=(1, 1)),
    ),
    "query ranges that overlap": (
        3,
        masked(
            AttnMask.from_ranges(
                [(0, 20), (5, 30), (5, 30), (18, 30)],
                [(0, 7), (7, 15), (20, 30), (15, 20)],
                ["causal", "inv_causal", "full", "bi_causal"],
                30,
                30,
            )
        ),
    ),
    "all rows of a rank empty": (2, masked(HALF)),
    "all rows of a rank empty, with a sink": (2, masked(HALF, sink=True)),
    "nothing attended": (4, masked(AttnMask.from_slices([], 9, 13), sink=True)),
    "everything on one rank": (4, masked(AttnMask.causal(15), sizes=(0, 0, 15, 0))),
    "keys on one rank, rows on another": (
        3,
        masked(AttnMask.full(9, 15), sizes=(9, 0, 0), k_sizes=(0, 0, 15)),
    ),
    "one token": (8, masked(AttnMask.causal(1), heads=(8, 8), sink=True)),
    "no tokens": (3, masked(AttnMask.causal(0))),
    "no keys": (3, masked(AttnMask.full(7, 0), sink=True)),
    "no rows": (3, masked(AttnMask.full(0, 7), sink=True)),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str) -> None:
    ranks, case = EXTREMES[name]
    check_dense(case, ranks)


@pytest.mark.parametrize(
    ("ranks", "heads"), [(3, (3, 3)), (4, (16, 8)), (8, (8, 8)), (8, (24, 8)), (8, (12, 4))]
)
def test_plans_that_split_heads(heads: tuple[int, int], ranks: int) -> None:
    layout = f"striped:16:{ranks}:1"
    case = masked(AttnMask.full(16), heads=heads, layout=layout, dropout=0.2, alibi=True, sink=True)
    with planned_for(COSTS["links are slow"]) as make:
        plan = make(case.given, *case.layouts(ranks), heads=heads, team_size=None)
        assert plan.team_size > 1
        check_dense(case, ranks)


@pytest.mark.parametrize(
    ("ranks", "team_size", "heads"),
    [
        *[(2, 2, (2, 2)), (2, 2, (5, 5)), (2, 2, (4, 1)), (4, 2, (6, 3)), (4, 4, (12, 1))],
        *[(3, 3, (5, 5)), (6, 3, (8, 2)), (8, 8, (12, 4))],
    ],
)
def test_heads_split_in_any_way(ranks: int, team_size: int, heads: tuple[int, int]) -> None:
    """Though it may not be the fastest."""

    def plan(*args: Any, **options: Any) -> Plan:
        return make_plan(*args, **{**options, "team_size": team_size})

    mask = AttnMask.streaming(40, 6, 2)
    with patch.object(call, "make_plan", plan):
        check_dense(masked(mask, heads=heads, dropout=0.2, alibi=True, sink=True, batch=2), ranks)
