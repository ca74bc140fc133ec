"""Sums of parts: in which dtype, rounded once, in whose memory."""

import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.kernels import Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.merge.merge import Sum, accumulation_dtype
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.rank_heads import RankHeads

from .merge_cases import LENGTH, RANGES, assert_rounded_once, most, part, ranges_drawn

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
