"""Rows moved, added and merged by index: plain torch against fp64, and the kernels against torch.

The kernels run on a CUDA device, or on the CPU under Triton's interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/core/merge/test_rows.py
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

from customized_ops.ring_attention.core.comm.transfer_side import (
    ROWS,
    STATS,
    TransferSide,
    add,
    copy,
    merge,
    place,
)
from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge import rows as fused
from customized_ops.ring_attention.core.merge.rows import add_rows, copy_rows, on_gpu
from customized_ops.ring_attention.core.plan.exchanges.exchange import Where

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


# ----------------------------------------------------------------------------------- the kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that launches; with ``count`` of what it has launched. Where kernels are
    interpreted it is used on the CPU too, outside :func:`by_torch`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    from customized_ops.ring_attention.core.merge import launch

    def counted(*args: Any) -> None:
        launch.count += 1
        launch_once(*args)

    launch_once = launch._launch
    monkeypatch.setattr(launch, "count", 0, raising=False)
    monkeypatch.setattr(launch, "off", False, raising=False)
    monkeypatch.setattr(launch, "_launch", counted)
    if INTERPRETED:
        merge_module = importlib.import_module("customized_ops.ring_attention.core.merge.merge")

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


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


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


@runs_kernels
def test_scattered_tokens_of_a_peer_move_in_one_launch(launched):
    """Heads of k and v: packed for a message, written to where they go, added up and merged."""
    dims = ROWS._replace(shares=((0, 2), (2, 6)))
    rows = [some_rows(40, 13, n).numpy() for n in range(2)]
    here, there = (Where(0, 13, (each, each + 1)) for each in rows)
    k, v = (drawn((1, 40, 6, 64), torch.float32, n) for n in range(2))
    source = TransferSide(on_device(k, v), [dims] * 2, {1: here})
    wires = [torch.float16] * 2
    parts = source.take(1, wires)
    assert launched.count == 1
    for part, t in zip(parts, (k, v), strict=True):
        assert part.is_contiguous() and torch.equal(part.cpu(), t[:, here.indices, 2:].half())
    zeros = [torch.zeros(1, 40, 6, 64, device=DEVICE) for _ in range(2)]
    target = TransferSide(zeros, [dims] * 2, {1: there})
    copy(source.of(1), target.of(1))
    add(target.of(1), parts)
    assert launched.count == 3
    for total, t in zip(zeros, (k, v), strict=True):
        want = t[:, here.indices, 2:] + t[:, here.indices, 2:].half()
        assert torch.equal(total[:, there.indices, 2:].cpu(), want)
        assert total.count_nonzero() == want.count_nonzero()
    place(target.of(1), parts)
    assert torch.equal(zeros[0][:, there.indices, 2:], parts[0].float())
    lse, part_lse = (torch.zeros(1, n, m, device=DEVICE) for n, m in ((6, 40), (4, 13)))
    results = TransferSide([zeros[0], lse], [dims, STATS._replace(shares=dims.shares)], {1: there})
    merge(results.of(1), [parts[1], part_lse])
    assert launched.count == 5
    want = (parts[0].float() + parts[1].float()) / 2
    assert_same("merged", zeros[0][:, there.indices, 2:], want, 1e-5)
    assert not zeros[0][..., :2, :].any() and lse.count_nonzero() == part_lse.numel()


@pytest.mark.gpu
def test_one_variant_for_all_lengths_and_strides(launched):
    """Nothing is compiled again for another length, offset or stride, nor for more batch."""
    if INTERPRETED:
        pytest.skip("interpreted kernels are not compiled")
    for b, length, first, heads in [(1, 64, 0, 8), (1, 1, 3, 8), (2, 99, 16, 8), (1, 513, 1, 8)]:
        out = drawn((b, length + first, heads * 2, 128), torch.bfloat16).cuda()[:, first:, :heads]
        lse = torch.zeros(b, heads * 2, length + first, device="cuda")[:, :heads, first:]
        merge_(out, lse, torch.ones_like(out), torch.zeros_like(lse))
        at = torch.arange(length, device="cuda")
        copy_rows([out, out], [torch.empty_like(out) for _ in range(2)], [1, 1], at)
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
    add_rows([part], [out], [1], rows)
    assert launched.count == 2
    copy_rows([out], [part], [1], rows)
    assert (part == 3).all() and not out[:, :-16].any()


@pytest.mark.gpu
def test_captured_in_a_graph(launched):
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    out, lse = (t.cuda() for t in results(1, 40, 4, 64, torch.bfloat16, 1))
    part, part_lse = (t.cuda() for t in results(1, 9, 4, 64, torch.bfloat16, 5))
    rows = some_rows(40, 9).cuda()
    want, want_lse = out.clone(), lse.clone()
    merge_(want, want_lse, part, part_lse, rows)  # compiles
    add_rows([part], [want], [1], rows)
    taken = torch.empty_like(part)
    copy_rows([want], [taken], [1], rows)
    expected, graph = taken.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_(out, lse, part, part_lse, rows)
        add_rows([part], [out], [1], rows)
        copy_rows([out], [taken], [1], rows)
    taken.zero_()
    graph.replay()
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and torch.equal(taken, expected)


def test_tensors_on_the_cpu_take_torchs_path():
    assert on_gpu(torch.zeros(1, 4, 2, 16)) is None
