"""What annotated ops on DTensors refuse, and that ranks go on after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dtensor_jobs
import pytest
from op_cases import Case
from ranks import Pool

from customized_ops.ring_attention import Layout

from .dtensor_cases import CROSS, DENSE, MATMUL, WHOLE_KEYS, alone, check

FROZEN = """\
PartitionError: wrap_ring_attn_func: 'hd' cannot be split
    b l h hd^, b l h hd^, b l h vd^ -> b l h vd^, b h l
          ^~~
    it is marked frozen: 'hd^'
    can be split: 'b', 'l', 'h'"""

FIXED = """\
PartitionError: column_max: '1' cannot be split
    m^ k, 1 -> ?
          ^
    it is a fixed size
    can be split: 'k'"""

FROZEN_ROWS = """\
PartitionError: wrap_masked_attn_func: 'lq' cannot be split
    b^ lq^ (g^ 3) hd^, b^ al^ g^ hd^, b^ al^ g^ vd^, s^ 6, (g^ 3), (g^ 3), 1 -> b^ lq^ (g^ 3) vd^, \
b^ (g^ 3) lq^
       ^~~
    it is marked frozen: 'lq^'
    can be split: nothing in this annotation"""

LAID_OUT_ROWS = """\
PartitionError: wrap_masked_attn_func: 'lq' cannot be split
    b lq^ (g 3) hd^, b al^ g hd^, b al^ g vd^, s^ 6, (g 3), (g 3) -> b lq^ (g 3) vd^, b (g 3) lq^
      ^~~
    it is marked frozen: 'lq^'
    can be split: 'b', 'g'"""

FROZEN_KEYS = """\
PartitionError: wrap_masked_attn_func: 'al' cannot be split
    b lq (g 3) hd^, b al^ g hd^, b al^ g vd^, s^ 6, (g 3), (g 3) -> b lq (g 3) vd^, b (g 3) lq
                      ^~~
    it is marked frozen: 'al^'
    can be split: 'b', 'lq', 'g'"""

DISAGREEING = """\
PartitionError: wrap_ring_attn_func: inputs are cut on different identifiers, 'l' and 'h', along \
one mesh axis
    b l h hd^, b l h hd^, b l h vd^ -> b l h vd^, b h l
                   ^
    along mesh axis 'inner' over 2 ranks: q is cut on dim 1, k is cut on dim 2, v is whole
    expected: 'l' (q on dim 1, k on dim 1, v on dim 1) or 'h' (q on dim 2, k on dim 2, v on dim \
2); inputs that are whole fit any of them"""

DISAGREEING_MATMUL = """\
PartitionError: matmul: inputs are cut on different identifiers, 'm' and 'k', along one mesh axis
    m k+, k+ n -> m n
          ^~
    along mesh axis 'inner' over 2 ranks: x is cut on dim 0, w is cut on dim 0
    expected: 'm' (x on dim 0) or 'k' (x on dim 1, w on dim 0); inputs that are whole fit any of \
them"""

DISAGREEING_FROZEN = """\
PartitionError: column_max: inputs are cut on different identifiers, 'm' and '1', along one mesh \
axis
    m^ k, 1 -> ?
          ^
    along mesh axis 'inner' over 2 ranks: x is cut on dim 0, scale is cut on dim 0
    expected: 'k' (x on dim 1); inputs that are whole fit any of them"""

TORN = """\
PartitionError: wrap_ring_attn_func: 'g' = 3 cannot be cut over 2 ranks
    b l (g 2) hd^, b l g hd^, b l g vd^ -> b l (g 2) vd^, b (g 2) l
        ^~~~~
    it is part of an inner dim, so the number of ranks must divide it"""


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (("attention", DENSE, ["3", "3", "R"]), FROZEN),
        (("user_op", "column_max", ((4, 6), (1,)), ["R", "0"]), FIXED),
        (("attention", DENSE, ["1", "2", "R"]), DISAGREEING),
        (("user_op", "matmul", MATMUL, ["0", "0"]), DISAGREEING_MATMUL),
        (("user_op", "column_max", ((4, 6), (1,)), ["0", "0"]), DISAGREEING_FROZEN),
        (("attention", Case("ring", 8, heads=(6, 3)), ["2", "2", "2"]), TORN),
        (
            ("attention", Case("ring", 8, dropout=0.5), ["1", "R", "R"], (2,), WHOLE_KEYS),
            "ArgumentError: wrap_ring_attn_func: dropout_p=0.5 does not go with q_rows: it draws "
            "by the tokens and heads of the whole; set it to 0",
        ),
        (("attention", replace(CROSS, dropout=0.5), ["1", "R", "R"]), FROZEN_ROWS),
        (
            ("attention", CROSS, ["1", "R", "R"], (2,), {"layout": Layout.contiguous(6, 1)}),
            LAID_OUT_ROWS,
        ),
        (("attention", CROSS, ["R", "1", "1"]), FROZEN_KEYS),
        (
            ("user_op", "scale_groups", ((4, 9), (3,)), ["1", "0"]),
            "PartitionError: scale_groups: 'g' = 3 cannot be cut over 2 ranks\n"
            "    l (g 3), g -> l (g 3)\n"
            "      ^~~~~\n"
            "    it is part of an inner dim, so the number of ranks must divide it",
        ),
    ],
)
def test_errors(two_ranks: Pool, job: Any, said: str) -> None:
    assert two_ranks.run(dtensor_jobs.refused, *job) == [said] * 2


TWICE = """\
PartitionError: wrap_ring_attn_func: 'l' is cut along two mesh axes
    b l h hd^, b l h hd^, b l h vd^ -> b l h vd^, b h l
{caret}
    along mesh axis 'outer' over 2 ranks: {outer}
    along mesh axis 'inner' over 2 ranks: {inner}
    expected: 'l' along one of them, and along the other 'b', 'h', or nothing"""


def test_one_identifier_along_two_axes(four_ranks: Pool) -> None:
    everywhere = ", ".join(f"{name} is cut on dim 1" for name in "qkv")
    for places, caret, outer, inner in (
        (["11", "11", "11"], 6, everywhere, everywhere),
        (
            ["1R", "R1", "RR"],
            17,
            "q is cut on dim 1, k is whole, v is whole",
            "q is whole, k is cut on dim 1, v is whole",
        ),
    ):
        replies = four_ranks.run(dtensor_jobs.refused, "attention", DENSE, places, (2, 2))
        said = TWICE.format(caret=" " * caret + "^", outer=outer, inner=inner)
        assert replies == [said] * 4


def test_ranks_go_on_after_an_error(two_ranks: Pool) -> None:
    assert "frozen" in two_ranks.run(dtensor_jobs.refused, "attention", DENSE, ["3", "R", "R"])[0]
    check(two_ranks.run(dtensor_jobs.attention, DENSE, ["1"] * 3), "1 2 1 1 1", alone(DENSE))


def test_more_ranks_than_heads(two_ranks: Pool) -> None:
    """A rank may be left without heads; it then computes nothing and waits for nobody."""
    case = Case("ring", 8, heads=(1, 1))
    replies = two_ranks.run(dtensor_jobs.attention, case, ["2", "2", "2"])
    check(replies, "2 1 2 2 2", alone(case))
