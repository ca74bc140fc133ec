"""How many ranks share out heads, as the caller says it: Ulysses, a ring, or one in the other."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from op_cases import Case, check_dense

from customized_ops.ring_attention import AttnMask, run_ranks, wrap_ring_attn_func
from customized_ops.ring_attention.op import bound

CASES = {
    "ring": Case("ring", 21, heads=(6, 2), batch=2, sizes=(5, 0, 9, 7)),
    "packed": Case("varlen", 23, heads=(4, 4), cu_seqlens=(0, 3, 17, 23), alibi=True),
    "masked": Case("masked", 19, heads=(5, 1), given=AttnMask.prefix_lm(19, 4), sink=True),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_plan_has_teams_of_that_size(name: str, size: int) -> None:
    case, ran = CASES[name], []

    def recorded(plan: Any, *args: Any) -> Any:
        ran.append(plan.team_size)
        return forward(plan, *args)

    forward, own = bound.attention_forward, replace(case, options=(("team_size", size),))
    with patch.object(bound, "attention_forward", recorded):
        check_dense(own, 4)
    assert ran == [size] * 4


@pytest.mark.parametrize(
    ("size", "ranks", "message"),
    [
        (0, 2, "team_size must be a number of ranks, 1 or more, or None, got 0"),
        (True, 2, "team_size must be a number of ranks, 1 or more, or None, got True"),
        (
            3,
            4,
            "team_size=3 must divide the group's 4 ranks and be at most the 2 heads of q; 1, 2 "
            "would fit, or None",
        ),
        (4, 4, "team_size=4 must divide the group's 4 ranks and be at most the 2 heads of q"),
        (2, 1, "team_size=2 must divide the group's 1 ranks"),
    ],
)
def test_sizes_that_do_not_fit(size: Any, ranks: int, message: str) -> None:
    def call(comm: Any) -> None:
        comm.start = None  # nothing may be sent
        q = torch.zeros(1, 4, 2, 8)
        wrap_ring_attn_func(q, q, q, process_group=comm, team_size=size)

    with pytest.raises(ValueError, match=re.escape(f"wrap_ring_attn_func: {message}")):
        run_ranks(ranks, call)
