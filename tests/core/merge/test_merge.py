import itertools

import pytest
import torch
from dense import assert_same, dense_attention
from hypothesis import example, given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.kernels import Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge.merge import (
    Accumulator,
    Sum,
    accumulation_dtype,
    unattended,
)
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.rank_heads import RankHeads

INF = torch.inf
# Keys of the parts; row 0 attends nothing, row 1 the third part only, row 2 the first two.
PARTS = [slice(0, 3), slice(3, 4), slice(4, 9), slice(9, 9)]


def problem(scale: float = 1.0):
    draw = torch.Generator().manual_seed(1)
    q, k = (scale * torch.randn(2, n, 2, 4, dtype=torch.float64, generator=draw) for n in (6, 9))
    v = torch.randn(2, 9, 2, 3, dtype=torch.float64, generator=draw)
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[0] = False
    mask[1, :4] = False
    mask[2, 4:] = False
    whole = dense_attention(q, k, v, mask, 0.5)
    parts = [dense_attention(q, k[:, p], v[:, p], mask[:, p], 0.5) for p in PARTS]
    return q, whole, parts


def accumulate(parts) -> Accumulator:
    total = Accumulator()
    for out, lse in parts:
        total.add(out.clone(), lse.clone())
    return total


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(PARTS)))))
def test_any_order_gives_the_whole(order):
    q, (out, lse), parts = problem()
    got_out, got_lse = accumulate(parts[n] for n in order).result(q, 3, torch.float64)
    assert_same("out", got_out, out)
    assert_same("lse", got_lse, lse)
    assert (got_lse[..., 0] == -INF).all() and (got_out[:, 0] == 0).all()


def test_any_grouping_gives_the_whole():
    q, (out, lse), (a, b, c, d) = problem()
    left, right = (accumulate(pair).result(q, 3, torch.float64) for pair in ((a, c), (d, b)))
    got_out, got_lse = accumulate([right, left]).result(q, 3, torch.float64)
    assert_same("out", got_out, out)
    assert_same("lse", got_lse, lse)


def test_large_scores_do_not_overflow():
    q, (out, lse), parts = problem(scale=60.0)
    assert lse[lse.isfinite()].max() > 1000  # exp() of it is infinite
    got_out, got_lse = accumulate(parts).result(q, 3, torch.float64)
    assert_same("out", got_out, out)
    assert_same("lse", got_lse, lse, tolerance=1e-9)


def test_merge_in_place():
    out, lse = torch.full((1, 1, 1, 1), 2.0), torch.zeros(1, 1, 1)
    merge_(out, lse, torch.full((1, 1, 1, 1), 6.0), torch.full((1, 1, 1), 3.0).log())
    assert_same("out", out, torch.full((1, 1, 1, 1), 5.0), 1e-6)  # (1 * 2 + 3 * 6) / 4
    assert_same("lse", lse, torch.full((1, 1, 1), 4.0).log(), 1e-6)


def test_lse_of_minus_infinity():
    """Rows: neither side, only the running one, only the new one."""
    out, part = torch.tensor([0.0, 5.0, 0.0]), torch.tensor([0.0, 0.0, 7.0])
    lse, part_lse = torch.tensor([-INF, 1.0, -INF]), torch.tensor([-INF, -INF, -2.0])
    out, part = (t.view(1, 3, 1, 1).clone() for t in (out, part))
    lse, part_lse = (t.view(1, 1, 3).clone() for t in (lse, part_lse))
    merge_(out, lse, part, part_lse)
    assert_same("out", out.flatten(), torch.tensor([0.0, 5.0, 7.0]), 0.0)
    assert_same("lse", lse.flatten(), torch.tensor([-INF, 1.0, -2.0]), 0.0)


def test_a_single_part_is_returned_as_it_is():
    q, _, parts = problem()
    total = Accumulator()
    total.add(*parts[0])
    out, lse = total.result(q, 3, torch.float64)
    assert out is parts[0][0] and lse is parts[0][1]


def test_no_part_is_unattended():
    rows = torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16)
    for out, lse in (
        Accumulator().result(rows, 6, torch.bfloat16),
        unattended(rows, 6, torch.bfloat16),
    ):
        assert out.shape == (2, 5, 3, 6) and out.dtype == torch.bfloat16 and (out == 0).all()
        assert lse.shape == (2, 3, 5) and lse.dtype == torch.float32 and (lse == -INF).all()


def test_low_precision_parts_merge_in_fp32():
    """256 parts of weight 1/256: in bf16 the running mean would stop moving at 8 bits."""
    values = torch.linspace(1, 2, 256).bfloat16()
    rows = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    total = Accumulator()
    for value in values:
        total.add(value.view(1, 1, 1, 1).clone(), torch.zeros(1, 1, 1))
    out, lse = total.result(rows, 1, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out.item() == values.float().mean().bfloat16().item()
    assert_same("lse", lse, torch.full((1, 1, 1), 256.0).log(), 1e-5)


def test_results_wait_in_the_dtype_asked_for():
    """Rows whose parts are merged at home are not rounded before."""
    rows = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    for parts in ([1 / 3], [1 / 3, 1 / 3], []):
        total = Accumulator()
        for value in parts:
            total.add(torch.full((1, 1, 1, 1), value), torch.zeros(1, 1, 1))
        wide, _ = total.result(rows, 1, torch.float32)
        narrow, _ = total.result(rows, 1, torch.bfloat16)
        assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
        want = torch.full((1, 1, 1, 1), 1 / 3 if parts else 0.0)
        assert_same("out", wide, want, 1e-7)
        assert torch.equal(narrow, want.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_accumulation_dtype(dtype, wide):
    assert accumulation_dtype(dtype) == wide


# ------------------------------------------------------------------- parts of some of the rows

LENGTH = 12
RANGES = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted), max_size=5)


def most(ranges) -> int:
    """Parts of the row that has most."""
    return max(sum(start <= n < stop for start, stop in ranges) for n in range(LENGTH))


def ranges_drawn(ranges, dtypes, seed):
    """A part [2, n, 3, 4] and its lse for each range."""
    draw = torch.Generator().manual_seed(seed)
    for (start, stop), dtype in zip(ranges, dtypes, strict=False):
        out = torch.randn(2, stop - start, 3, 4, generator=draw).to(dtype)
        yield slice(start, stop), out, torch.randn(2, 3, stop - start, generator=draw)


def assert_rounded_once(got, want) -> None:
    """``got`` is within half a step of bf16 of ``want``, and what fp32 adds to that."""
    assert got.shape == want.shape and not got.isnan().any()
    half_step = 2.0 ** (torch.frexp(want).exponent - 9)
    error = (got.double() - want).abs()
    assert (error <= half_step + 1e-6).all(), "rounded to bf16 more than once"


def test_rounding_twice_shows():
    """A sum of three parts that is rounded after two is not what assert_rounded_once takes."""
    a, b, c = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = a.double() + b.double() + c.double()
    assert_rounded_once(want.float().bfloat16(), want)
    with pytest.raises(AssertionError, match="more than once"):
        assert_rounded_once(a + b + c, want)


@settings(deadline=None, derandomize=True)
@given(RANGES, st.booleans(), st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 99))
@example([[0, 2], [2, 12], [2, 12]], True, [False, True, False, True, True], 0)
def test_ranges_of_rows_merge_as_whole_parts_do(ranges, known, wide, seed):
    """Parts of some rows, in any dtypes: in fp64 with the rest unattended, then rounded once."""
    dtypes = [torch.float32 if w else torch.bfloat16 for w in wide]
    want = torch.zeros(2, LENGTH, 3, 4, dtype=torch.float64)
    want_lse = torch.full((2, 3, LENGTH), -INF, dtype=torch.float64)
    total = Accumulator(LENGTH, most(ranges) if known else None)
    for rows, out, lse in ranges_drawn(ranges, dtypes, seed):
        merge_(want[:, rows], want_lse[..., rows], out.double(), lse.double())
        total.add(out.clone(), lse.clone(), None if rows == slice(0, LENGTH) else rows)
    like = torch.zeros(2, LENGTH, 3, 4, dtype=torch.bfloat16)
    got, got_lse = total.result(like, 4, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert_rounded_once(got, want)
    assert_same("lse", got_lse, want_lse, 1e-5)


def test_two_parts_stay_narrow():
    """Of each row; the first part's memory is the result's."""
    for parts, dtype in ((2, torch.bfloat16), (3, torch.float32), (None, torch.float32)):
        total = Accumulator(parts=parts)
        first = torch.ones(1, 4, 1, 1, dtype=torch.bfloat16)
        total.add(first, torch.zeros(1, 1, 4))
        for rows in (slice(0, 1), slice(2, 4)):
            count = rows.stop - rows.start
            total.add(first[:, rows] + 1, torch.zeros(1, 1, count), rows)
        out, lse = total.result(first, 1, dtype)
        assert (out is first) == (parts == 2) and out.dtype == dtype
        assert out.flatten().tolist() == [1.5, 1.0, 1.5, 1.5]
        assert_same("lse", lse, torch.tensor([[[2.0, 1.0, 2.0, 2.0]]]).log(), 1e-6)


def test_only_rows_without_a_part_are_filled():
    """Parts of some rows first: 0 and -inf are written where no part was, and nothing else is."""
    total = Accumulator(5, parts=2)
    total.add(torch.ones(1, 2, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 2), slice(1, 3))
    out, lse = total.result(torch.zeros(1, 5, 1, 1, dtype=torch.bfloat16), 1, torch.bfloat16)
    assert out.flatten().tolist() == [0, 1, 1, 0, 0]
    assert lse.flatten().tolist() == [-INF, 0, 0, -INF, -INF]


# ------------------------------------------------------------------------------------ sums


def part(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1, 2, 4, 3), value, dtype=dtype)


LIKE = part(9.0, torch.bfloat16)


def test_a_single_part_is_the_sum_as_it_is():
    for dtype in (torch.bfloat16, torch.float32):
        total, only = Sum(LIKE), part(1.0, dtype)
        total.add(only)
        assert total.so_far() is only
    narrow = Sum(LIKE)
    narrow.add(only := part(1.0, torch.bfloat16))
    assert narrow.result() is only


def test_no_part_is_zero():
    for of in (Sum.so_far, Sum.result):
        assert_same("sum", of(Sum(LIKE)), torch.zeros_like(LIKE), 0.0)
        assert of(Sum(LIKE)).dtype == torch.bfloat16
    assert_same("sum", Sum(LIKE).wide(), torch.zeros_like(LIKE).float(), 0.0)
    assert Sum(LIKE).wide().dtype == torch.float32


@pytest.mark.parametrize("like", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("second", [torch.bfloat16, torch.float32])
def test_sums_are_in_the_accumulation_dtype(like, first, second):
    """1 + 2^-10 is no bf16: a sum in bf16 would stay at 1."""
    total = Sum(part(0.0, like))
    total.add(part(1.0, first))
    total.add(part(2.0**-10, second))
    assert total.so_far().dtype == total.wide().dtype == accumulation_dtype(like)
    assert (total.so_far() == 1 + 2.0**-10).all()
    assert total.result().dtype == like


def test_256_parts_round_once():
    total = Sum(LIKE)
    for value in (values := torch.linspace(1, 2, 256).bfloat16()):
        total.add(part(value.item(), torch.bfloat16))
    assert (total.result() == values.double().sum().bfloat16()).all()


def test_the_first_part_is_the_sums_own():
    """Later parts, and the tensor that the sum is of, are left alone."""
    total, first, second = Sum(LIKE), part(1.0, torch.float32), part(2.0, torch.float32)
    total.add(first)
    total.add(second)
    assert total.wide() is first and (first == 3).all()
    assert (second == 2).all() and (LIKE == 9).all()


def test_wide_is_one_tensor_that_later_parts_reach():
    """What arrives is added to it while further parts of the rank's own come."""
    for first in (None, torch.bfloat16, torch.float32):
        total = Sum(LIKE)
        if first is not None:
            total.add(part(1.0, first))
        place = total.wide()
        total.add(part(2.0, torch.bfloat16))
        place.add_(4.0)
        assert total.wide() is place
        assert (total.result() == (6.0 if first is None else 7.0)).all()


@pytest.mark.parametrize("team_size", [1, 2, 4])
def test_a_share_of_the_heads_is_added_in_its_place(team_size):
    plan = make_plan(AttnMask.dense(8), Layout.contiguous(8, 4), heads=(4, 4), team_size=team_size)
    each = 4 // team_size
    for rank in range(4):
        share, total = RankHeads(plan, rank, LIKE, LIKE, Scoring(1.0), None), Sum(LIKE)
        for value in (1.0, 2.0):
            share.add(total, part(value, torch.bfloat16)[:, :, :each].clone(), share.keys)
        want, first = torch.zeros(4), rank % team_size * each
        want[first : first + each] = 3.0
        assert_same("sum", total.so_far(), want[:, None].expand(1, 2, 4, 3), 0.0)


@settings(deadline=None, derandomize=True)
@given(
    RANGES,
    st.booleans(),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from(["result", "wide", "so_far"]),
    st.integers(0, 99),
)
def test_ranges_of_rows_add_up_as_whole_parts_do(ranges, known, wide, how, seed):
    dtypes = [torch.float32 if w else torch.bfloat16 for w in wide]
    like = torch.zeros(2, LENGTH, 3, 4, dtype=torch.bfloat16)
    want, total = like.double(), Sum(like, most(ranges) if known else None)
    for rows, out, _ in ranges_drawn(ranges, dtypes, seed):
        want[:, rows] += out.double()
        total.add(out.clone(), None if rows == slice(0, LENGTH) else rows)
    got = getattr(total, how)()
    assert_rounded_once(got, want)
    assert how != "result" or got.dtype == torch.bfloat16


def test_two_parts_add_up_in_the_first_ones_memory():
    for parts in (2, 3, None):
        total, first = Sum(LIKE, parts), part(1.0, torch.bfloat16)
        total.add(first)
        total.add(part(2.0, torch.bfloat16)[:, :1], slice(0, 1))
        assert (total.so_far() is first) == (parts == 2)
        assert total.so_far().dtype == (torch.bfloat16 if parts == 2 else torch.float32)
        assert (total.result()[:, 0] == 3).all() and (total.result()[:, 1] == 1).all()


def test_a_narrow_sum_of_a_wide_tensor_widens():
    """However few the parts: 1 + 2^-10 is no bf16."""
    total = Sum(part(0.0, torch.float32), parts=2)
    total.add(part(1.0, torch.bfloat16))
    total.add(part(2.0**-10, torch.bfloat16))
    assert (total.result() == 1 + 2.0**-10).all()


@pytest.mark.parametrize("parts", [2, None])
@pytest.mark.parametrize("first", [None, slice(1, 2), slice(0, 2)])
def test_place_is_where_what_arrives_is_added(parts, first):
    total = Sum(LIKE, parts)
    if first is not None:
        total.add(part(1.0, torch.bfloat16)[:, first], first)
    place = total.place()
    narrow = parts == 2 and first is not None
    assert place.dtype == (torch.bfloat16 if narrow else torch.float32)
    assert total.place() is place
    place[:, 1:].add_(part(2.0, torch.float32)[:, 1:])
    want = torch.zeros_like(LIKE)
    want[:, slice(0, 0) if first is None else first] += 1
    want[:, 1:] += 2
    assert torch.equal(total.result(), want)
