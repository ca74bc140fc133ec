"""Rows moved, added and merged by index: plain torch against fp64, and the kernels against torch.

The kernels run on a CUDA device, or on the CPU under Triton's interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/core/test_fused.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core import fused
from customized_ops.ring_attention.core.fused import add_rows, on_gpu, put_rows, take_rows
from customized_ops.ring_attention.core.merge import merge_

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Of tests that run kernels. The interpreter warns of log(0), which is what is meant.
runs_kernels = (
    pytest.mark.filterwarnings("ignore:divide by zero") if INTERPRETED else pytest.mark.gpu
)
LOW = [torch.bfloat16, torch.float16, torch.float32]
EPS = {dtype: torch.finfo(dtype).eps for dtype in [*LOW, torch.float64]}
INF = torch.inf


def drawn(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)


def some_rows(length: int, count: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=draw)[:count]


# ------------------------------------------------------------------------- plain torch, any device


def merged_in_fp64(out, lse, part, part_lse):
    """The formula as it stands, on rows that some side attends; 0 and -inf on the others."""
    a, b = lse.double().exp(), part_lse.double().exp()
    per_row = lambda x: x.transpose(1, 2).unsqueeze(-1)  # noqa: E731
    total = a + b
    want = (per_row(a) * out.double() + per_row(b) * part.double()) / per_row(total)
    return want.nan_to_num(0.0), total.log()


def results(b: int, length: int, h: int, d: int, dtype: torch.dtype, seed: int):
    """out and lse of which a third of the rows attends nothing."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = drawn((b, length, h, d), dtype, seed), drawn((b, h, length), wide, seed + 1)
    nothing = drawn((b, h, length), wide, seed + 2) < -0.4
    out.masked_fill_(nothing.transpose(1, 2).unsqueeze(-1), 0.0)
    return out, lse.masked_fill_(nothing, -INF)


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
def test_adding_rows(total_dtype, part_dtype):
    total, part = drawn((2, 7, 3, 4), total_dtype), drawn((2, 5, 3, 4), part_dtype, 1)
    rows = some_rows(7, 5)
    want = total.clone()
    want[:, rows] = (total[:, rows].float() + part.float()).to(total_dtype)
    add_rows(total, part, rows)
    assert torch.equal(total, want)


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


@pytest.mark.parametrize("dtype", [*LOW, torch.float64, torch.int64])
def test_taking_and_putting_rows(dtype):
    rows = some_rows(9, 4)
    k, lse = (10 * drawn((2, 9, 3, 4))).to(dtype), (10 * drawn((2, 3, 9))).to(dtype)
    taken = take_rows([k, lse], rows)
    assert torch.equal(taken[0], k[:, rows]) and torch.equal(taken[1], lse[..., rows])
    wide = torch.zeros(2, 4, 6, 4, dtype=dtype)
    places = [wide[:, :, 1:4], torch.zeros_like(taken[1])]
    assert take_rows([k, lse], rows, places)[0] is places[0]
    assert torch.equal(wide[:, :, 1:4], k[:, rows]) and torch.equal(places[1], lse[..., rows])
    assert not wide[:, :, 0].any() and not wide[:, :, 4:].any()
    back = [torch.zeros_like(k), torch.zeros_like(lse)]
    put_rows(back, taken, rows)
    there = torch.zeros(9, dtype=torch.bool).index_fill_(0, rows, True)
    assert torch.equal(back[0], k * there.view(1, 9, 1, 1))
    assert torch.equal(back[1], lse * there)


# ----------------------------------------------------------------------------------- the kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that launches; with ``count`` of what it has launched. Where kernels are
    interpreted it is used on the CPU too, outside :func:`by_torch`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    from customized_ops.ring_attention.core.fused import launch

    def counted(*args: Any) -> None:
        launch.count += 1
        launch_once(*args)

    launch_once = launch._launch
    monkeypatch.setattr(launch, "count", 0, raising=False)
    monkeypatch.setattr(launch, "off", False, raising=False)
    monkeypatch.setattr(launch, "_launch", counted)
    if INTERPRETED:
        merge_module = importlib.import_module("customized_ops.ring_attention.core.merge")

        def choose(*tensors: torch.Tensor) -> ModuleType | None:
            rows = all(t.dim() == 4 for t in tensors)
            return launch if rows and not launch.off and launch.fits(*tensors) else None

        monkeypatch.setattr(fused, "on_gpu", choose)
        monkeypatch.setattr(merge_module, "on_gpu", choose)
    yield launch


def by_torch(launched: ModuleType, function: Callable[..., Any], *tensors: Any) -> Any:
    """What the plain torch path makes of these tensors, on the CPU."""
    before, launched.off = launched.count, True
    result = function(*tensors)
    launched.off = False
    assert launched.count == before, "compared with the kernel itself"
    return result


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(DEVICE) for t in tensors]


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


@runs_kernels
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("total_dtype", LOW)
@pytest.mark.parametrize("part_dtype", LOW)
def test_add_kernel(launched, d, total_dtype, part_dtype):
    total, part = drawn((2, 40, 6, d), total_dtype), drawn((2, 13, 3, d), part_dtype, 1)
    rows = some_rows(40, 13)
    want = total.clone()
    by_torch(launched, add_rows, want[:, :, 3:], part, rows)
    got, part, rows = on_device(total, part, rows)
    add_rows(got[:, :, 3:], part, rows)
    assert launched.count == 1
    if INTERPRETED and total_dtype == torch.bfloat16:  # the interpreter cuts bits off
        want, slack = want.double(), EPS[total_dtype] * want.double().abs()
        assert ((got.double() - want).abs() <= slack).all()
        assert torch.equal(got[:, :, :3], total[:, :, :3])
    else:
        assert torch.equal(got.cpu(), want)


def taken_from(t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return t[:, rows] if t.dim() == 4 else t[..., rows]


@runs_kernels
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("dtype", LOW)
def test_copy_kernel(launched, d, dtype):
    """Five tensors of rows in two launches; those of other heads, and lse, apart."""
    tensors = [drawn((2, 40, 6, d), dtype, n) for n in range(5)]
    tensors += [drawn((2, 40, 3, d), dtype, 5), drawn((2, 6, 40), torch.float32, 6)]
    rows = some_rows(40, 13)
    want = [taken_from(t, rows) for t in tensors]
    there, rows_there = on_device(*tensors), rows.to(DEVICE)
    outs = [torch.empty_like(t, device=DEVICE) for t in want]
    room = torch.zeros(2, 13, 12, d, dtype=dtype, device=DEVICE)
    outs[0] = room[:, :, 3:9]
    taken = take_rows(there, rows_there, outs)
    assert launched.count == 3  # lse is torch's
    for got, of in zip(taken, want, strict=True):
        assert torch.equal(got.cpu(), of)
    assert not room[:, :, :3].any() and not room[:, :, 9:].any()
    back = [torch.zeros_like(t) for t in there]
    put_rows(back, taken, rows_there)
    assert launched.count == 6
    for got, t in zip(back, tensors, strict=True):
        home = torch.zeros_like(t)
        by_torch(launched, put_rows, [home], [taken_from(t, rows)], rows)
        assert torch.equal(got.cpu(), home)


@runs_kernels
def test_no_rows(launched):
    """Nothing is launched, and nothing changes."""
    total, none = torch.ones(1, 4, 2, 8, device=DEVICE), torch.ones(1, 0, 2, 8, device=DEVICE)
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    add_rows(total, none, rows)
    put_rows([total], [none], rows)
    (taken,) = take_rows([total], rows)
    assert taken.shape == (1, 0, 2, 8) and (total == 1).all()


@runs_kernels
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1, 4, 2, 20),  # 20 elements are no whole vectors
        lambda: torch.zeros(1, 4, 2, 16, dtype=torch.float64),
        lambda: torch.zeros(1, 4, 16, 2).transpose(2, 3),
        lambda: torch.zeros(1, 4, 2, 17)[..., 1:],
        lambda: torch.zeros(65)[1:].view(1, 4, 2, 8),
    ],
    ids=["width", "dtype", "strides", "row strides", "address"],
)
def test_what_the_kernels_do_not_take(launched, make):
    assert not launched.fits(make().to(DEVICE))
    assert launched.fits(torch.zeros(1, 4, 2, 16, device=DEVICE))


@pytest.mark.gpu
def test_one_variant_for_all_lengths_and_strides(launched):
    """Nothing is compiled again for another length, offset or stride, nor for more batch."""
    if INTERPRETED:
        pytest.skip("interpreted kernels are not compiled")
    for b, length, first, heads in [(1, 64, 0, 8), (1, 1, 3, 8), (2, 99, 16, 8), (1, 513, 1, 8)]:
        out = drawn((b, length + first, heads * 2, 128), torch.bfloat16).cuda()[:, first:, :heads]
        lse = torch.zeros(b, heads * 2, length + first, device="cuda")[:, :heads, first:]
        merge_(out, lse, torch.ones_like(out), torch.zeros_like(lse))
        take_rows([out, out], torch.arange(length, device="cuda"))
        if first == 0:
            variants = len(launched._variants)
            caches = [len(c[0]) for c in launched.kernels.merge.device_caches.values()]
    assert len(launched._variants) == variants
    assert [len(c[0]) for c in launched.kernels.merge.device_caches.values()] == caches


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(launched):
    """Row 2^31 / (h d) and beyond, of a tensor of 4 GiB."""
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    length, h, d = 2**31 // (32 * 128) + 64, 32, 128
    out = torch.zeros(1, length, h, d, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(1, h, length, device="cuda")
    rows = torch.arange(length - 16, length, device="cuda")
    part = torch.full((1, 16, h, d), 2.0, dtype=torch.bfloat16, device="cuda")
    merge_(out, lse, part, torch.zeros(1, h, 16, device="cuda"), rows)
    add_rows(out, part, rows)
    assert launched.count == 2
    (taken,) = take_rows([out], rows)
    assert (taken == 3).all() and not out[:, :-16].any()


@pytest.mark.gpu
def test_captured_in_a_graph(launched):
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    out, lse = (t.cuda() for t in results(1, 40, 4, 64, torch.bfloat16, 1))
    part, part_lse = (t.cuda() for t in results(1, 9, 4, 64, torch.bfloat16, 5))
    rows = some_rows(40, 9).cuda()
    want, want_lse = out.clone(), lse.clone()
    merge_(want, want_lse, part, part_lse, rows)  # compiles
    add_rows(want, part, rows)
    taken = torch.empty_like(part)
    take_rows([want], rows, [taken])
    expected, graph = taken.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_(out, lse, part, part_lse, rows)
        add_rows(out, part, rows)
        take_rows([out], rows, [taken])
    taken.zero_()
    graph.replay()
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and torch.equal(taken, expected)


def test_tensors_on_the_cpu_take_torchs_path():
    assert on_gpu(torch.zeros(1, 4, 2, 16)) is None
