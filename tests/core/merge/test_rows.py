"""Rows moved, added and merged by index in plain torch, against fp64."""

from __future__ import annotations

import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge.rows import add_rows, copy_rows

from .row_cases import EPS, LOW, drawn, results, some_rows


def merged_in_fp64(out, lse, part, part_lse):
    """The formula as it stands, on rows that some side attends; 0 and -inf on the others."""
    a, b = lse.double().exp(), part_lse.double().exp()
    per_row = lambda x: x.transpose(1, 2).unsqueeze(-1)  # noqa: E731
    total = a + b
    want = (per_row(a) * out.double() + per_row(b) * part.double()) / per_row(total)
    return want.nan_to_num(0.0), total.log()


@settings(deadline=None, derandomize=True)
@given(
    st.integers(1, 2), st.integers(1, 9), st.integers(1, 3), st.integers(1, 5),
    st.sampled_from([*LOW, torch.float64]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_merging_is_the_formula(b, length, h, d, dtype, by_index, seed):
    count = max(length - 2, 1) if by_index else length
    out, lse = results(b, length, h, d, dtype, seed)
    part, part_lse = results(b, count, h, d, dtype, seed + 10)
    rows = some_rows(length, count, seed)
    at = rows if by_index else torch.arange(length)
    want, want_lse = out.double(), lse.double()
    want[:, at], want_lse[..., at] = merged_in_fp64(out[:, at], lse[..., at], part, part_lse)
    merge_(out, lse, part, part_lse, rows if by_index else None)
    assert_same("out", out, want, 4 * (EPS[dtype] + EPS[lse.dtype]))
    assert_same("lse", lse, want_lse, 8 * EPS[lse.dtype])


def test_two_low_parts_round_once():
    """Merged in place in bf16 is what merging wide and rounding at the end gives."""
    out, lse = results(1, 40, 2, 16, torch.bfloat16, 1)
    part, part_lse = results(1, 40, 2, 16, torch.bfloat16, 2)
    wide, wide_lse = out.float(), lse.clone()
    merge_(wide, wide_lse, part, part_lse)
    merge_(out, lse, part, part_lse)
    assert torch.equal(out, wide.bfloat16()) and torch.equal(lse, wide_lse)


@pytest.mark.parametrize("total_dtype", LOW)
@pytest.mark.parametrize("part_dtype", LOW)
@pytest.mark.parametrize("rows", [some_rows(7, 5), None])
def test_adding_rows(total_dtype, part_dtype, rows):
    count = 7 if rows is None else 5
    total, part = drawn((2, 7, 3, 4), total_dtype), drawn((2, count, 3, 4), part_dtype, 1)
    lse, part_lse = drawn((2, 3, 7), total_dtype, 2), drawn((2, 3, count), part_dtype, 3)
    at = slice(None) if rows is None else rows
    want, want_lse = total.clone(), lse.clone()
    want[:, at] = (total[:, at].float() + part.float()).to(total_dtype)
    want_lse[..., at] = (lse[..., at].float() + part_lse.float()).to(total_dtype)
    add_rows([part, part_lse], [total, lse], [1, 2], rows)
    assert torch.equal(total, want) and torch.equal(lse, want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("total_dtype", LOW)
@pytest.mark.parametrize("part_dtype", LOW)
def test_torch_adds_a_part_in_fp32(total_dtype, part_dtype):
    """Why adding to a range of rows needs no kernel of ours."""
    total = drawn((2, 70, 3, 64), total_dtype).cuda()
    part = drawn((2, 50, 3, 64), part_dtype, 1).cuda()
    want = (total[:, 10:60].float() + part.float()).to(total_dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        total[:, 10:60].add_(part)
    assert torch.equal(total[:, 10:60], want)
    assert sum(event.count for event in profile.key_averages() if "kernel" in event.key) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [*LOW, torch.float64, torch.int64])
@pytest.mark.parametrize("target_dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scattered", ["there", "here", "both", "neither"])
def test_copying_rows(dtype, target_dtype, scattered):
    """Of tensors with rows in unlike dims, into heads of a wider one; what is around stays."""
    count, here, there = 4, scattered in ("here", "both"), scattered in ("there", "both")
    from_rows, to_rows = some_rows(9, count), some_rows(7, count, 1)
    from_length, to_length = 9 if here else count, 7 if there else count
    k = (10 * drawn((2, from_length, 3, 4))).to(dtype)
    lse = (10 * drawn((2, 3, from_length))).to(dtype)
    wide = torch.zeros(2, to_length, 6, 4, dtype=target_dtype or dtype)
    home = torch.zeros(2, 3, to_length, dtype=target_dtype or dtype)
    want, want_home = wide.clone(), home.clone()
    source = from_rows if here else slice(None)
    target = to_rows if there else slice(None)
    want[:, target, 1:4] = k[:, source].to(wide.dtype)
    want_home[..., target] = lse[..., source].to(wide.dtype)
    rows = from_rows if here else None, to_rows if there else None
    copy_rows([k, lse], [wide[:, :, 1:4], home], [1, 2], *rows)
    assert torch.equal(wide, want) and torch.equal(home, want_home)
