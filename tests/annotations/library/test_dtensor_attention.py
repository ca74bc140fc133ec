"""Attention on DTensors that lie as a user put them: equal to one process, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dtensor_jobs
import pytest
import torch
from op_cases import Case
from ranks import Pool, worlds

from .dtensor_cases import CROSS, DENSE, WHOLE_KEYS, alone, check

GROUPED = Case("ring", 16, batch=2, heads=(4, 2))
PACKED = Case("varlen", 33, heads=(4, 2), cu_seqlens=(0, 7, 7, 8, 25, 33))


# lie: out, lse [b, h, l], dq, dk, dv
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("case", "places", "lie"),
    [
        (DENSE, ["R", "R", "R"], "R R R R R"),
        (DENSE, ["1", "1", "1"], "1 2 1 1 1"),  # l: communicates
        (DENSE, ["0", "0", "0"], "0 0 0 0 0"),  # batch
        (DENSE, ["2", "2", "2"], "2 1 2 2 2"),  # heads
        (GROUPED, ["1", "1", "1"], "1 2 1 1 1"),
        (GROUPED, ["2", "2", "2"], "2 1 2 2 2"),
        (GROUPED, ["0", "R", "R"], "0 0 0 0 0"),
        (GROUPED, ["1", "R", "R"], "1 2 1 1 1"),  # k, v are brought to q
        (GROUPED, ["R", "1", "1"], "1 2 1 1 1"),
        (GROUPED, ["R", "2", "R"], "2 1 2 2 2"),
        (GROUPED, ["1", "P", "P"], "1 2 1 1 1"),
        (Case("ring", 16, dims=(8, 5), causal=False), ["1", "1", "1"], "1 2 1 1 1"),
        (Case("ring", 16, window=(5, 0)), ["1", "1", "1"], "1 2 1 1 1"),
        (Case("zigzag", 18, heads=(4, 2)), ["1", "R", "R"], "1 2 1 1 1"),
        # uneven, and a rank with nothing
        (Case("ring", 17, heads=(4, 2)), ["1", "1", "1"], "1 2 1 1 1"),
        (Case("ring", 1, heads=(4, 2)), ["1", "1", "1"], "1 2 1 1 1"),
        (Case("ring", 8, batch=3), ["0", "0", "0"], "0 0 0 0 0"),
        (Case("ring", 8, batch=1), ["0", "0", "0"], "0 0 0 0 0"),
        (Case("ring", 8, heads=(3, 3)), ["2", "2", "2"], "2 1 2 2 2"),
        # packed: lse is [h, l]
        (PACKED, ["R", "R", "R"], "R R R R R"),
        (PACKED, ["0", "0", "0"], "0 1 0 0 0"),
        (PACKED, ["0", "R", "R"], "0 1 0 0 0"),
        (PACKED, ["1", "1", "1"], "1 0 1 1 1"),
        (Case("varlen", 1, cu_seqlens=(0, 0, 1)), ["0", "0", "0"], "0 1 0 0 0"),
    ],
)
def test_attention(two_ranks: Pool, case: Case, places: list[str], lie: str) -> None:
    check(two_ranks.run(dtensor_jobs.attention, case, places), lie, alone(case))


@worlds(cpus=[4], gpus=[4])
def test_attention_on_two_axes(ranks: Pool) -> None:
    uneven = Case("ring", 17, batch=2, heads=(4, 2))
    for case, places, lie in (
        (uneven, ["12", "12", "12"], "12 21 12 12 12"),  # l and heads
        (uneven, ["21", "RR", "RR"], "21 12 21 21 21"),  # heads and l, k and v brought
        (uneven, ["10", "10", "10"], "10 20 10 10 10"),  # l and batch
        (uneven, ["01", "R1", "0R"], "01 02 01 01 01"),
        (uneven, ["R1", "R1", "R1"], "R1 R2 R1 R1 R1"),  # two copies
        (PACKED, ["01", "01", "01"], "01 10 01 01 01"),
        (PACKED, ["10", "R0", "RR"], "10 01 10 10 10"),
    ):
        check(ranks.run(dtensor_jobs.attention, case, places, (2, 2)), lie, alone(case))


@worlds(cpus=[4], gpus=[4])
def test_attention_over_four_ranks(ranks: Pool) -> None:
    for length in (9, 5, 3):  # the last ranks hold less, or nothing
        case = Case("ring", length, heads=(4, 2))
        replies = ranks.run(dtensor_jobs.attention, case, ["1", "1", "1"], (4,))
        check(replies, "1 2 1 1 1", alone(case))


SCORED = Case("ring", 17, batch=2, heads=(6, 2), dims=(4, 3), sink=True, alibi=True, softcap=2.0)
NUMERICS = {"deterministic": True, "reduce_dtype": torch.float64}


DOCUMENTS = Case("varlen", 21, heads=(6, 2), sink=True, alibi=True, cu_seqlens=(0, 5, 5, 14, 21))
OTHER_KEYS = replace(DOCUMENTS, cu_seqlens_k=(0, 4, 9, 11, 18))


# lie: out, lse, dq, dk, dv, dsink
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("case", "places", "lie", "where"),
    [
        # what is given and what is not, on l, b and heads
        (SCORED, ["1", "1", "1"], "1 2 1 1 1 P", NUMERICS),
        (SCORED, ["0", "0", "0"], "0 0 0 0 0 P", {}),
        (SCORED, ["2", "2", "2"], "2 1 2 2 2 0", {}),
        (SCORED, ["2", "R", "R", "0"], "2 1 2 2 2 0", {}),
        (replace(SCORED, sink=False), ["2", "2", "2"], "2 1 2 2 2", {}),
        (replace(SCORED, alibi=False), ["1", "1", "1"], "1 2 1 1 1 P", {}),
        (DOCUMENTS, ["0", "0", "0"], "0 1 0 0 0 P", {}),
        (DOCUMENTS, ["1", "1", "1"], "1 0 1 1 1 0", {}),
        # heads of q alone: three a rank, of groups of three and of one of six
        (replace(SCORED, heads=(6, 1)), ["2", "R", "R"], "2 1 2 P P 0", {}),
        (replace(SCORED, heads=(9, 3)), ["2", "R", "R"], "2 1 2 P P 0", {}),
        (replace(DOCUMENTS, heads=(6, 3)), ["1", "R", "R"], "1 0 1 P P 0", {}),
        # rows of q alone
        (SCORED, ["1", "R", "R"], "1 2 1 P P P", WHOLE_KEYS),
        (SCORED, ["0", "R", "R"], "0 0 0 0 0 P", WHOLE_KEYS),
        (SCORED, ["2", "2", "2"], "2 1 2 2 2 0", WHOLE_KEYS),
        (SCORED, ["R", "R", "R"], "R R R R R R", WHOLE_KEYS),
        (replace(SCORED, length=1), ["1", "R", "R"], "1 2 1 P P P", WHOLE_KEYS),
        (replace(SCORED, op="zigzag"), ["1", "R", "R"], "1 2 1 P P P", WHOLE_KEYS),
        (DOCUMENTS, ["0", "R", "R"], "0 1 0 P P P", WHOLE_KEYS),
        # other keys than queries: nothing else can be cut of their sequences
        (CROSS, ["1", "R", "R"], "1 2 1 P P P", {}),
        (CROSS, ["2", "R", "R"], "2 1 2 2 2 0", {}),
        (OTHER_KEYS, ["0", "R", "R"], "0 1 0 P P P", {}),
    ],
)
def test_attention_with_all_that_scores_may_have(
    two_ranks: Pool, case: Case, places: list[str], lie: str, where: dict[str, Any]
) -> None:
    replies = two_ranks.run(dtensor_jobs.attention, case, places, (2,), where)
    check(replies, lie, alone(case))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("case", "places", "lie", "where"),
    [
        # more ranks than heads of k, or not a multiple; uneven, and a rank with none
        (SCORED, ["2", "R", "R"], "2 1 2 P P 0", {}),
        (replace(SCORED, heads=(4, 2)), ["2", "R", "R"], "2 1 2 P P 0", {}),
        (replace(SCORED, heads=(8, 1)), ["2", "R", "R"], "2 1 2 P P 0", {}),
        (replace(SCORED, heads=(10, 5)), ["2", "R", "R", "0"], "2 1 2 P P 0", {}),
        (replace(SCORED, heads=(2, 1)), ["2", "R", "R"], "2 1 2 P P 0", {}),
        (DOCUMENTS, ["1", "R", "R"], "1 0 1 P P 0", {}),
        (SCORED, ["1", "R", "R"], "1 2 1 P P P", WHOLE_KEYS),
        (replace(SCORED, length=5), ["1", "R", "R"], "1 2 1 P P P", WHOLE_KEYS),
        (CROSS, ["1", "R", "R"], "1 2 1 P P P", {}),
        (OTHER_KEYS, ["0", "R", "R"], "0 1 0 P P P", {}),
    ],
)
@worlds(cpus=[4], gpus=[4])
def test_parts_of_q_over_four_ranks(
    ranks: Pool, case: Case, places: list[str], lie: str, where: dict[str, Any]
) -> None:
    replies = ranks.run(dtensor_jobs.attention, case, places, (4,), where)
    check(replies, lie, alone(case))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("case", "places", "lie", "where"),
    [
        (replace(SCORED, heads=(4, 4)), ["12", "12", "12"], "12 21 12 12 12 P0", {}),  # l, h
        (SCORED, ["12", "12", "12"], "12 21 12 12 12 P0", {}),  # l and g
        (SCORED, ["01", "01", "01"], "01 02 01 01 01 PP", {}),  # b and l
        (SCORED, ["10", "10", "10"], "10 20 10 10 10 PP", {}),
        (replace(SCORED, heads=(6, 1)), ["12", "1R", "1R"], "12 21 12 1P 1P P0", {}),  # l and qh
        (replace(SCORED, heads=(9, 3)), ["21", "R1", "R1"], "21 12 21 P1 P1 0P", {}),
        (replace(SCORED, heads=(9, 3)), ["02", "0R", "0R"], "02 01 02 0P 0P P0", {}),  # b and qh
        (DOCUMENTS, ["01", "01", "01"], "01 10 01 01 01 P0", {}),
        (replace(DOCUMENTS, heads=(6, 1)), ["10", "R0", "R0"], "10 01 10 P0 P0 0P", {}),
        (SCORED, ["12", "R2", "R2"], "12 21 12 P2 P2 P0", WHOLE_KEYS),  # lq and g
        (replace(SCORED, heads=(9, 3)), ["12", "RR", "RR"], "12 21 12 PP PP P0", WHOLE_KEYS),
        (SCORED, ["10", "R0", "RR"], "10 20 10 P0 P0 PP", WHOLE_KEYS),  # lq and b
        (CROSS, ["12", "R2", "RR"], "12 21 12 P2 P2 P0", {}),
        (replace(CROSS, heads=(6, 1)), ["21", "RR", "RR"], "21 12 21 PP PP 0P", {}),
    ],
)
@worlds(cpus=[4], gpus=[4])
def test_two_splits_at_once(
    ranks: Pool, case: Case, places: list[str], lie: str, where: dict[str, Any]
) -> None:
    replies = ranks.run(dtensor_jobs.attention, case, places, (2, 2), where)
    check(replies, lie, alone(case))
