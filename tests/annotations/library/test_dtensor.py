"""Annotated ops on DTensors that lie as a user put them: equal to one process, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dtensor_jobs
import pytest
import torch
from dense import assert_same
from op_cases import Case, expected
from ranks import Pool, worlds

from customized_ops.ring_attention import AttnMask, Layout

MATMUL = ((4, 6), (6, 8))


def check(replies: list[Any], places: str, want: list[torch.Tensor]) -> None:
    """Every rank's whole results equal ``want``; results and gradients lie as ``places`` says."""
    for rank, (shown, wholes, _) in enumerate(replies):
        assert " ".join(shown) == places, f"rank {rank}"
        for n, (a, b) in enumerate(zip(wholes, want, strict=True)):
            assert_same(f"rank {rank}, tensor {n}", a, b)


def wanted(name: str, shapes: Any) -> list[torch.Tensor]:
    """Results and gradients of a user's op in plain torch."""
    inputs, douts = dtensor_jobs.user_inputs(name, shapes)
    leaves = [t.requires_grad_() for t in inputs]
    match name:
        case "matmul":
            results = [leaves[0] @ leaves[1]]
        case "two":
            results = [leaves[0] * 2 + sum(leaves[2:]), leaves[0].sum(1)[:, None] * leaves[1]]
        case "column_max":
            results = [leaves[0].amax(0) * leaves[1]]
        case "scale_groups":
            results = [leaves[0] * leaves[1].repeat_interleave(3)]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, leaves, douts)]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("shapes", "places", "lie"),
    [
        (MATMUL, ["R", "R"], "R R R"),
        # a replicated input of a split op gets a part of its gradient from each rank
        (MATMUL, ["0", "R"], "0 0 P"),
        (MATMUL, ["R", "1"], "1 P 1"),
        (MATMUL, ["1", "0"], "P 1 0"),
        # the other input is brought to where the annotation says
        (MATMUL, ["1", "R"], "P 1 0"),
        (MATMUL, ["R", "0"], "P 1 0"),
        # partial sums are summed before the op
        (MATMUL, ["P", "1"], "1 P 1"),
        (MATMUL, ["P", "P"], "R R R"),
        # uneven, and a rank with nothing
        (((5, 7), (7, 3)), ["0", "R"], "0 0 P"),
        (((5, 7), (7, 3)), ["1", "0"], "P 1 0"),
        (((1, 7), (7, 1)), ["0", "R"], "0 0 P"),
        (((4, 1), (1, 3)), ["1", "0"], "P 1 0"),
    ],
)
def test_user_op(two_ranks: Pool, shapes: Any, places: list[str], lie: str) -> None:
    check(
        two_ranks.run(dtensor_jobs.user_op, "matmul", shapes, places),
        lie,
        wanted("matmul", shapes),
    )


def test_results_are_really_cut(two_ranks: Pool) -> None:
    def local(places: list[str], shapes: Any = MATMUL) -> list[Any]:
        return [r[2] for r in two_ranks.run(dtensor_jobs.user_op, "matmul", shapes, places)]

    assert local(["0", "R"]) == [[(2, 8)]] * 2
    assert local(["1", "R"]) == [[(4, 8)]] * 2
    assert local(["R", "1"], ((4, 6), (6, 7))) == [[(4, 4)], [(4, 3)]]


@pytest.mark.parametrize(
    ("shapes", "places", "lie"),
    [
        (((4, 6), (3,)), ["0", "R"], "0 0 0 P"),
        # the first result is whole on every rank; its gradient counts once
        (((4, 6), (3,)), ["R", "0"], "R 1 P 0"),
        # a tensor that is not annotated is whole on every rank
        (((4, 6), (3,), (1,)), ["0", "R", "R"], "0 0 0 P P"),
        (((4, 6), (3,), (1,)), ["0", "R", "0"], "0 0 0 P P"),
    ],
)
def test_two_results(two_ranks: Pool, shapes: Any, places: list[str], lie: str) -> None:
    replies = two_ranks.run(dtensor_jobs.user_op, "two", shapes, places)
    check(replies, lie, wanted("two", shapes))


def test_a_result_that_the_annotation_leaves_open(two_ranks: Pool) -> None:
    shapes = ((4, 6), (1,))
    replies = two_ranks.run(dtensor_jobs.user_op, "column_max", shapes, ["R", "R"])
    check(replies, "R R R", wanted("column_max", shapes))


@pytest.mark.parametrize(
    ("groups", "places", "lie"),
    [
        (4, ["1", "R"], "1 1 0"),  # the first alternative: w is brought
        (4, ["1", "0"], "1 1 0"),
        (4, ["0", "R"], "0 0 P"),
        (3, ["1", "R"], "1 1 P"),  # the second: whole groups cannot be dealt out
        (1, ["1", "R"], "1 1 P"),
    ],
)
def test_alternatives(two_ranks: Pool, groups: int, places: list[str], lie: str) -> None:
    shapes = ((4, 3 * groups), (groups,))
    replies = two_ranks.run(dtensor_jobs.user_op, "scale_groups", shapes, places)
    check(replies, lie, wanted("scale_groups", shapes))


@pytest.mark.slow
def test_alternatives_on_two_axes(four_ranks: Pool) -> None:
    shapes = ((4, 9), (3,))
    for places, lie in ((["01", "RR"], "01 01 PP"), (["10", "RR"], "10 10 PP")):
        replies = four_ranks.run(dtensor_jobs.user_op, "scale_groups", shapes, places, (2, 2))
        check(replies, lie, wanted("scale_groups", shapes))


def test_user_op_on_two_axes(four_ranks: Pool) -> None:
    for places, lie in (
        (["01", "R0"], "0P 01 P0"),
        (["0R", "R1"], "01 0P P1"),
        (["1R", "01"], "P1 1P 01"),
        (["R0", "RR"], "R0 R0 RP"),
    ):
        replies = four_ranks.run(dtensor_jobs.user_op, "matmul", MATMUL, places, (2, 2))
        check(replies, lie, wanted("matmul", MATMUL))


def wanted_means(name: str, shapes: Any, used: tuple[int, ...]) -> list[torch.Tensor]:
    """Results and gradients of the ops around a mean over tokens, in plain torch."""
    inputs, douts = dtensor_jobs.user_inputs(name, shapes)
    leaves = [t.requires_grad_() for t in inputs]
    m = leaves[0].mean(1)
    results = [m] if name == "mean" else [(leaves[0] - m[:, None]) * leaves[1], m * leaves[1]]
    grads = torch.autograd.grad([results[n] for n in used], leaves, [douts[n] for n in used])
    return [*(r.detach() for r in results), *grads]


CENTRED = ("centred", "centred by shares", "centred by wholes")


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CENTRED)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_of_what_a_communicating_split_leaves_whole(
    two_ranks: Pool, name: str, used: tuple[int, ...]
) -> None:
    """The gradient of the mean counts once, whoever of the ranks computes it."""
    shapes = ((2, 5, 3), (3,))
    want = wanted_means(name, shapes, used)
    for places, lie in ((["1", "R"], "1 R 1 P"), (["0", "R"], "0 0 0 P"), (["R", "R"], "R R R R")):
        replies = two_ranks.run(dtensor_jobs.user_op, name, shapes, places, (2,), used)
        check(replies, lie, want)


def test_gradients_of_the_only_result_that_is_whole(two_ranks: Pool) -> None:
    """No input is whole; what the backward adds up, it adds up inside."""
    want = wanted_means("mean", ((2, 5, 3),), (0,))
    check(two_ranks.run(dtensor_jobs.user_op, "mean", ((2, 5, 3),), ["1"]), "R 1", want)


def test_gradients_of_what_is_whole_along_one_of_two_axes(four_ranks: Pool) -> None:
    for name in CENTRED:
        shapes = ((2, 5, 3), (3,))
        want = wanted_means(name, shapes, (0, 1))
        for places, lie in ((["01", "RR"], "01 0R 01 PP"), (["1R", "RR"], "1R RR 1R PR")):
            replies = four_ranks.run(dtensor_jobs.user_op, name, shapes, places, (2, 2))
            check(replies, lie, want)


DENSE = Case("ring", 16, batch=2)
GROUPED = Case("ring", 16, batch=2, heads=(4, 2))
PACKED = Case("varlen", 33, heads=(4, 2), cu_seqlens=(0, 7, 7, 8, 25, 33))


def alone(case: Case) -> list[torch.Tensor]:
    """On one device, of a loss of out and lse; those two are what dense attention gives."""
    want = dtensor_jobs.alone(case)
    for name, got, dense in zip(("out", "lse"), want, expected(case), strict=False):
        assert_same(name, got, dense)
    return want


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
WHOLE_KEYS = {"q_rows": (0, 1)}
CROSS = Case(
    "masked", 6, given=AttnMask.causal(6, 11), heads=(6, 2), batch=2, sink=True, alibi=True
)
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
