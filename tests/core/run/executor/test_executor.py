"""The executor on in-process ranks against dense attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from dense import assert_same, dense_gradients
from executed import LAYOUTS, MASKS, NAMES, PLAIN, SCALE, STRIDES, N, Shape, check, run
from torch import Tensor

from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.choose.search import ASSIGNMENTS

from .executor_cases import CASES, global_and_local, refuses, tiny_documents


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("stages", [None, 1, 2])
def test_table(mask, layout, stages):
    plan = make_plan(mask, layout(mask.q_len), layout(mask.k_len), stages=stages)
    check(plan, Shape().draw(mask))


@pytest.mark.covering(2)
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("team_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kernels_and_strides(assignment, kernel, strides, team_size):
    mask = AttnMask.dense(N, causal=True, window=(9, 0))
    tensors = Shape().draw(mask)
    if reason := refuses(kernel, tensors, PLAIN):
        pytest.skip(reason)
    plan = make_plan(mask, Layout.contiguous(N, 4), assignment=assignment, team_size=team_size)
    check(plan, tensors, kernel=kernel, strides=STRIDES[strides])


@pytest.mark.covering(2)
@pytest.mark.parametrize("stages", [0, 1, 2])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("lengths", [(31, 53), (7, 60), (40, 9)], ids=str)
def test_q_and_k_in_different_layouts(lengths, assignment, stages):
    q_len, k_len = lengths
    mask = AttnMask.dense(q_len, k_len, causal=q_len < k_len)
    layouts = Layout.zigzag(q_len, 3), Layout.from_sizes([k_len // 2, 0, k_len - k_len // 2])
    check(make_plan(mask, *layouts, assignment=assignment, stages=stages), Shape().draw(mask))


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize(("stages", "team_size"), [(0, 1), (2, 1), (1, 2)])
def test_named_cases(case, assignment, stages, team_size):
    mask, q_layout, k_layout = case
    shape = Shape(batch=1)
    options = {"assignment": assignment, "team_size": team_size, "heads": shape.heads}
    check(make_plan(mask, q_layout, k_layout, stages=stages, **options), shape.draw(mask))


ROWS_MOVE = ["few queries", "few queries, other layouts", "global rows", "global rows, zigzag"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ROWS_MOVE)
@pytest.mark.parametrize("team_size", [1, 2])
@pytest.mark.parametrize("stages", [0, 2])
def test_rows_of_several_teams_are_merged_at_home(name, team_size, stages):
    """That the cases above do run what they are there for."""
    mask, q_layout, k_layout = CASES[name]
    shape = Shape(q_heads=4, kv_heads=2)
    options = {"assignment": "nearest", "team_size": team_size, "heads": shape.heads}
    plan = make_plan(mask, q_layout, k_layout, stages=stages, **options)
    assert plan.shared_rows and plan.team_size == team_size
    ranks = [plan.rank(r) for r in range(plan.group_size)]
    assert any(len(mine.q.recv) for mine in ranks), "rows move"
    assert any(len(stage.remote) for mine in ranks for stage in mine.stages)
    for kernel in ("torch", "reference"):
        check(plan, shape.draw(mask), kernel=kernel)


@pytest.mark.slow
def test_thousands_of_documents():
    mask = tiny_documents(2000)
    shape = Shape(batch=1, q_heads=2, kv_heads=1, d=2, e=2)
    tensors = shape.draw(mask)
    want, _ = run(make_plan(mask, Layout.contiguous(mask.q_len, 1)), tensors, kernel="reference")
    for layout in (Layout.contiguous, Layout.zigzag):
        plan = make_plan(mask, layout(mask.q_len, 8), stages=1)
        got, _ = run(plan, tensors, kernel="reference")
        for name, *values in zip(NAMES, got, want, strict=True):
            assert_same(name, *values)
    # And one rank against attention of each document by itself.
    sizes = mask.slices[:, 1] - mask.slices[:, 0]
    for q0, size in zip(mask.slices[::97, 0].tolist(), sizes[::97].tolist(), strict=True):
        here = [t[:, q0 : q0 + size] for t in tensors]
        alone = AttnMask.dense(size, causal=True)
        parts = dense_gradients(*here[:3], alone, SCALE, here[3])
        for name, whole, part, dim in zip(NAMES, want, parts, (1, 2, 1, 1, 1), strict=True):
            assert_same(name, whole.narrow(dim, q0, size), part)


@pytest.mark.thin(6)
@pytest.mark.skipif(not hasattr(Layout, "from_ranges"), reason="no layouts of any order yet")
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("stages", [0, 1, 2])
@pytest.mark.parametrize("team_size", [1, 2])
def test_tokens_in_any_order(assignment, stages, team_size):
    """Ranks hold their ranges out of order."""
    ranges = [[(30, 40), (0, 5)], [(12, 20), (5, 9), (20, 21)], [], [(21, 30), (9, 12)]]
    layout = Layout.from_ranges(ranges)
    for mask in (AttnMask.dense(40, causal=True), global_and_local(40, 2, 6)):
        options = {"assignment": assignment, "team_size": team_size, "stages": stages}
        check(make_plan(mask, layout, **options), Shape().draw(mask))
        other = Layout.contiguous(40, 4)
        check(make_plan(mask, layout, other, **options), Shape().draw(mask))
        check(make_plan(mask, other, layout, **options), Shape().draw(mask))


def test_gradient_of_a_sum():
    """Its output gradient is one number expanded over every dim."""
    mask = AttnMask.dense(N, causal=True)
    q, k, v, dout = Shape().draw(mask)
    ones = torch.ones((), dtype=torch.float64).expand_as(dout)
    check(make_plan(mask, Layout.contiguous(N, 4)), [q, k, v, ones])


def _odd_rows(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (0, 1))[..., :-1]


def _odd_start(t: Tensor) -> Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def _sparse(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=-1)[..., ::2]


@pytest.mark.parametrize("place", [_odd_rows, _odd_start, _sparse, torch.Tensor.contiguous])
def test_kernels_may_load_16_bytes_at_a_time(monkeypatch, place):
    """And what lies so already is not copied."""
    mask, reference = AttnMask.dense(N, causal=True), KERNELS["reference"]
    tensors = [place(t.bfloat16()) for t in Shape(d=8, e=8).draw(mask)]
    seen = []

    def whole(t):
        assert t.stride(-1) == 1 and t.data_ptr() % 16 == 0
        assert all(stride * t.itemsize % 16 == 0 for stride in t.stride()[:-1])
        seen.append(t.data_ptr())

    def watched(compute, count):
        def run(*args, **options):
            for t in args[0][:count]:
                whole(t)
            return compute(*args, **options)

        return run

    monkeypatch.setattr(reference, "forward", watched(reference.forward, 3))
    monkeypatch.setattr(reference, "backward", watched(reference.backward, 5))
    run(make_plan(mask, Layout.contiguous(N, 1)), tensors, "reference")
    *given, dout = (t.data_ptr() for t in tensors)
    assert len(seen) == 8
    same = [seen[:3] == given, seen[3:7] == [dout, *given]]
    assert same == [place is torch.Tensor.contiguous] * 2


def test_ranks_without_tokens():
    mask = AttnMask.dense(3, causal=True)
    for stages in (0, 1, 3):
        check(make_plan(mask, Layout.contiguous(3, 8), stages=stages), Shape().draw(mask))


def test_arguments_are_left_alone():
    mask = AttnMask.dense(N, causal=True)
    tensors = Shape().draw(mask)
    before = [t.clone() for t in tensors]
    run(make_plan(mask, Layout.contiguous(N, 4), stages=2), tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_runs_are_reproducible_to_the_bit():
    mask = AttnMask.dense(N, causal=True)
    tensors = [t.float() for t in Shape().draw(mask)]
    plan = make_plan(mask, Layout.contiguous(N, 8), stages=3)
    first, _ = run(plan, tensors)
    for _ in range(5):
        again, _ = run(plan, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ----------------------------------------------------------------------- bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("team_size", [1, 2, 4])
@pytest.mark.parametrize("heads", [(8, 4), (6, 3), (5, 1)], ids=str)
def test_bytes_are_as_planned(heads, dtype, stages, assignment, team_size):
    packed = AttnMask.varlen([0, 30, 37, 80], causal=True)
    batch = 1 + stages
    shape = Shape(batch, *heads, d=8, e=5)
    layout = Layout.from_sizes([0, 40, 10, 30])
    for mask in (packed, global_and_local(80, 2, 6)):
        options = {"assignment": assignment, "team_size": team_size, "heads": shape.heads}
        plan = make_plan(mask, layout, stages=stages, **options)
        _, traffic = run(plan, [t.to(dtype) for t in shape.draw(mask)])
        sizes = (*shape.heads, shape.d, shape.e, dtype.itemsize)
        forward, backward = plan.forward_bytes(*sizes), plan.backward_bytes(*sizes)
        assert forward.sum() > 0 and backward.sum() > forward.sum()
        assert traffic.forward == (batch * forward).tolist()
        assert traffic.backward == (batch * backward).tolist()
        if assignment == "nearest" and mask is not packed and team_size < 4 and heads == (8, 4):
            assert plan.shared_rows and plan.q_tokens().sum() > 0
