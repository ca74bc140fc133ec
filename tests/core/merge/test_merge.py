"""Parts of a result, merged in any order and in part of the rows."""

import itertools

import pytest
import torch
from dense import assert_same, dense_attention
from hypothesis import example, given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge.merge import (
    Accumulator,
    accumulation_dtype,
    unattended,
)

from .merge_cases import LENGTH, RANGES, assert_rounded_once, most, ranges_drawn

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
