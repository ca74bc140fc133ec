"""Kernels that move, add and merge rows, against plain torch.

They run on a CUDA device, or on the CPU under Triton's interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/core/merge/test_row_kernels.py
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from dense import assert_same

from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge.rows import add_rows, copy_rows, sum_rows
from customized_ops.ring_attention.core.plan.exchanges.peer_tokens import TokenList, Where

from .row_cases import (
    DEVICE,
    EPS,
    INF,
    INTERPRETED,
    LOW,
    drawn,
    on_device,
    results,
    runs_kernels,
    some_rows,
    zeros,
)


def by_torch(launched: ModuleType, function: Callable[..., Any], *tensors: Any) -> Any:
    """What the plain torch path makes of these tensors, on the CPU."""
    before, launched.off = launched.count, True
    result = function(*tensors)
    launched.off = False
    assert launched.count == before, "compared with the kernel itself"
    return result


DIMS = [8, 64, 96, 128, 192, 256]
MIXED = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
]
SHAPES = [(1, 37, 5), (2, 8, 1), (1, 1, 32)]  # batch, rows, heads


@runs_kernels
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(("b", "length", "h"), SHAPES)
@pytest.mark.parametrize("by_index", [False, True])
def test_merge_kernel(launched, b, length, h, d, by_index):
    for out_dtype, part_dtype in MIXED:
        total = length + 6 if by_index else length
        out, lse = results(b, total, h, d, out_dtype, 1)
        part, part_lse = results(b, length, h, d, part_dtype, 5)
        rows = some_rows(total, length) if by_index else None
        want, want_lse = out.clone(), lse.clone()
        got, got_lse, part_there, part_lse_there = on_device(out, lse, part, part_lse)
        by_torch(launched, merge_, want, want_lse, part, part_lse, rows)
        before = launched.count
        merge_(got, got_lse, part_there, part_lse_there, rows if rows is None else rows.to(DEVICE))
        assert launched.count == before + 1
        assert_same("out", got.cpu(), want, 8 * EPS[out_dtype])
        assert_same("lse", got_lse.cpu(), want_lse, 1e-5)


@runs_kernels
def test_merge_kernel_on_views(launched):
    """Ranges of rows and heads of larger tensors, and heads before rows as some kernels give them;
    what is around them stays."""
    out, lse = results(2, 30, 8, 64, torch.bfloat16, 1)
    part, part_lse = results(2, 11, 4, 64, torch.bfloat16, 5)
    want, want_lse = out.clone(), lse.clone()
    wanted = want[:, 7:18, 2:6], want_lse[:, 2:6, 7:18]
    by_torch(launched, merge_, *wanted, part, part_lse)
    got, got_lse, part, part_lse = on_device(out, lse, part, part_lse)
    part = part.transpose(1, 2).contiguous().transpose(1, 2)
    part_lse = part_lse.transpose(1, 2).contiguous().transpose(1, 2)
    merge_(got[:, 7:18, 2:6], got_lse[:, 2:6, 7:18], part, part_lse)
    assert launched.count == 1
    assert_same("out", got.cpu(), want, 8 * EPS[torch.bfloat16])
    assert_same("lse", got_lse.cpu(), want_lse, 1e-5)


@runs_kernels
def test_merge_kernel_keeps_what_one_side_attends(launched):
    """Exactly, whether running or new; and rows of neither side at 0 and -inf."""
    out, part = drawn((1, 3, 1, 8), torch.bfloat16), drawn((1, 3, 1, 8), torch.bfloat16, 1)
    out[:, [0, 2]], part[:, [0, 1]] = 0.0, 0.0
    lse = torch.tensor([-INF, 1.5, -INF]).view(1, 1, 3)
    part_lse = torch.tensor([-INF, -INF, -700.0]).view(1, 1, 3)
    want = out + part
    out, lse, part, part_lse = on_device(out, lse, part, part_lse)
    merge_(out, lse, part, part_lse)
    assert launched.count == 1
    assert torch.equal(out.cpu(), want)
    assert lse.flatten().tolist() == [-INF, 1.5, -700.0]


@runs_kernels
def test_merge_kernel_with_large_scores(launched):
    lse, part_lse = torch.full((1, 1, 2), 5000.0), torch.tensor([[[5000.0, -5000.0]]])
    out, part = torch.full((1, 2, 1, 8), 2.0), torch.full((1, 2, 1, 8), 6.0)
    out, lse, part, part_lse = on_device(out, lse, part, part_lse)
    merge_(out, lse, part, part_lse)
    assert launched.count == 1
    assert out[0, :, 0, 0].tolist() == [4.0, 2.0]
    assert_same("lse", lse.cpu(), torch.tensor([[[5000.0 + 0.6931, 5000.0]]]), 1e-3)


def assert_rounded(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same; to bf16 the interpreter cuts bits off."""
    if INTERPRETED and want.dtype == torch.bfloat16:
        slack = EPS[want.dtype] * want.double().abs()
        assert ((got.double() - want.double()).abs() <= slack).all()
    else:
        assert torch.equal(got.cpu(), want)


@runs_kernels
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("total_dtype", LOW)
@pytest.mark.parametrize("part_dtype", LOW)
def test_add_kernel(launched, d, total_dtype, part_dtype):
    """dk and dv in one launch, into some of the heads."""
    totals = [drawn((2, 40, 6, d), total_dtype, n) for n in range(2)]
    parts = [drawn((2, 13, 3, d), part_dtype, n) for n in (2, 3)]
    rows = some_rows(40, 13)
    wants = [total.clone() for total in totals]
    by_torch(launched, add_rows, parts, [want[:, :, 3:] for want in wants], [1, 1], rows)
    gots = on_device(*totals)
    add_rows(on_device(*parts), [got[:, :, 3:] for got in gots], [1, 1], rows.to(DEVICE))
    assert launched.count == 1
    for got, want, total in zip(gots, wants, totals, strict=True):
        assert_rounded(got, want)
        assert torch.equal(got[:, :, :3].cpu(), total[:, :, :3])


@runs_kernels
@pytest.mark.parametrize("total_dtype", LOW)
@pytest.mark.parametrize("part_dtype", LOW)
def test_sums_of_rows(launched, total_dtype, part_dtype):
    """Tokens of 0 to 5 rows, in one launch; each sum is rounded once."""
    totals = [drawn((2, 40, 6, 64), total_dtype, n) for n in range(2)]
    parts = [drawn((2, 240, 3, 64), part_dtype, n) for n in (2, 3)]
    ends = np.sort(np.random.default_rng(0).integers(0, 41, (2, 6)), axis=0).T
    pieces = {
        n: Where(0, stop - start, (ends[n, :1], ends[n, 1:]))
        for n, (start, stop) in enumerate(ends)
    }
    of = TokenList.of(pieces, TokenList({}, Where(0, 0), True))
    indices = of.where.indices
    parts = [part[:, : len(indices)] for part in parts]
    wants = []
    for total, part in zip(totals, parts, strict=True):
        wide = total.float().clone()
        for row, token in enumerate(indices):
            wide[:, token, 3:] += part[:, row].float()
        wants.append(wide.to(total_dtype))
    assert of.summed and set(np.bincount(indices)) >= {1, 2, 3}
    assert not sum_rows(on_device(*parts), on_device(*totals), [1, 2], *of.sums)
    assert launched.count == 0
    gots = on_device(*totals)
    assert sum_rows(on_device(*parts), [got[:, :, 3:] for got in gots], [1, 1], *of.sums)
    assert launched.count == 1
    for got, want in zip(gots, wants, strict=True):
        assert_rounded(got, want)


@runs_kernels
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("target_dtype", LOW)
@pytest.mark.parametrize("scattered", ["there", "here", "both"])
def test_copy_kernel(launched, d, dtype, target_dtype, scattered):
    """Four tensors of rows in two launches; those of other heads, and lse, apart."""
    here, there = scattered != "there", scattered != "here"
    lengths = 40 if here else 13, 29 if there else 13
    rows = some_rows(40, 13) if here else None, some_rows(29, 13, 1) if there else None
    shapes = [(6, d)] * 4 + [(3, d)]
    sources = [drawn((2, lengths[0], *shape), dtype, n) for n, shape in enumerate(shapes)]
    targets = [drawn((2, lengths[1], *shape), target_dtype, 9) for shape in [(9, d), *shapes[1:]]]
    sources += [drawn((2, 6, lengths[0]), dtype, 5)]
    targets += [drawn((2, 6, lengths[1]), target_dtype, 6)]
    dims = [1] * len(shapes) + [2]

    def copied(into: list[torch.Tensor], copy: Callable[..., Any]) -> list[torch.Tensor]:
        copy([into[0][:, :, 2:8], *into[1:]])
        return into

    wants = copied(
        [t.clone() for t in targets],
        lambda into: by_torch(launched, copy_rows, sources, into, dims, *rows),
    )
    rows_there = [None if each is None else each.to(DEVICE) for each in rows]
    on, before = on_device(*sources), launched.count
    gots = copied(on_device(*targets), lambda into: copy_rows(on, into, dims, *rows_there))
    assert launched.count - before == 3  # lse is torch's
    for got, want in zip(gots, wants, strict=True):
        assert_rounded(got, want)


@runs_kernels
def test_no_rows(launched):
    """Nothing is launched, and nothing changes."""
    total, none = torch.ones(1, 4, 2, 8, device=DEVICE), torch.ones(1, 0, 2, 8, device=DEVICE)
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    add_rows([none], [total], [1], rows)
    copy_rows([none], [total], [1], to_rows=rows)
    copy_rows([total], [none], [1], from_rows=rows)
    assert (total == 1).all()


@runs_kernels
def test_rows_in_another_dim_are_torchs(launched):
    """The kernels' rows are dim 1 of 4."""
    source, target = drawn((6, 4, 2, 8)).to(DEVICE), torch.zeros(3, 4, 2, 8, device=DEVICE)
    rows = some_rows(6, 3)
    copy_rows([source], [target], [0], from_rows=rows.to(DEVICE))
    add_rows([target.clone()], [source], [0], rows.to(DEVICE))
    assert launched.count == 0
    assert torch.equal(source.cpu()[rows], 2 * target.cpu())


@runs_kernels
@pytest.mark.parametrize(
    "make",
    [
        lambda: zeros(1, 4, 2, 20),  # 20 elements are no whole vectors
        lambda: zeros(1, 4, 2, 16, dtype=torch.float64),
        lambda: zeros(1, 4, 16, 2).transpose(2, 3),
        lambda: zeros(1, 4, 2, 17)[..., 1:],
        lambda: zeros(65)[1:].view(1, 4, 2, 8),
    ],
    ids=["width", "dtype", "strides", "row strides", "address"],
)
def test_what_the_kernels_do_not_take(launched, make):
    assert not launched.fits(make())
    assert launched.fits(zeros(1, 4, 2, 16))
