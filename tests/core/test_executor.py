"""The executor on in-process ranks against dense attention over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dense import assert_same, dense_gradients
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import KERNELS, Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan

NAMES = ("out", "lse", "dq", "dk", "dv")
SCALE = 0.4


@dataclass(frozen=True)
class Shape:
    """Sizes beside the sequence's."""

    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    d: int = 4
    e: int = 3

    def draw(self, mask: AttnMask, seed: int = 0) -> list[Tensor]:
        """q, k, v, dout, Gaussian, fp64."""
        source = torch.Generator().manual_seed(seed)
        sizes = [
            (mask.q_len, self.q_heads, self.d),
            (mask.k_len, self.kv_heads, self.d),
            (mask.k_len, self.kv_heads, self.e),
            (mask.q_len, self.q_heads, self.e),
        ]
        return [
            torch.randn((self.batch, *size), dtype=torch.float64, generator=source)
            for size in sizes
        ]


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sent and received, [P, 2] as Plan.forward_bytes."""

    forward: list[list[int]]
    backward: list[list[int]]


def counted(comm: Comm) -> np.ndarray:
    return np.array([comm.counters.sent_bytes, comm.counters.received_bytes])


def run(plan: Plan, tensors: list[Tensor], kernel: str = "torch", strides=lambda t: t):
    """(out, lse, dq, dk, dv) of the whole sequence, and the ranks' traffic.

    ``strides`` is applied to each rank's own tensors.
    """
    q, k, v, dout = tensors
    chosen = KERNELS[kernel]

    def body(comm: Comm):
        mine = [plan.q_layout.shard(q, comm.rank)]
        mine += [plan.k_layout.shard(t, comm.rank) for t in (k, v)]
        mine = [strides(t) for t in mine]
        own_dout = strides(plan.q_layout.shard(dout, comm.rank))
        out, lse = attention_forward(plan, comm, chosen, *mine, Scoring(SCALE))
        forward = counted(comm)
        gradients = attention_backward(
            plan, comm, chosen, own_dout, *mine, out, lse, Scoring(SCALE)
        )
        backward = counted(comm) - forward
        return (out, lse, *gradients), forward.tolist(), backward.tolist()

    results, forward, backward = zip(*run_ranks(plan.group_size, body), strict=True)
    layouts = (plan.q_layout, plan.q_layout, plan.q_layout, plan.k_layout, plan.k_layout)
    dims = (1, 2, 1, 1, 1)
    shards = zip(*results, strict=True)
    whole = [
        layout.unshard(parts, dim) for layout, parts, dim in zip(layouts, shards, dims, strict=True)
    ]
    return whole, Traffic(list(forward), list(backward))


def check(plan: Plan, tensors: list[Tensor], **options) -> None:
    got, _ = run(plan, tensors, **options)
    want = dense_gradients(*tensors[:3], plan.mask, SCALE, tensors[3])
    for name, *values in zip(NAMES, got, want, strict=True):
        assert_same(name, *values)


# Strides that a rank's tensors may have; the last one has a sparse last dim.
STRIDES = {
    "as they come": lambda t: t,
    "heads outside tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a wider tensor": lambda t: torch.cat([t, t], dim=-1)[..., t.shape[-1] :],
    "tokens innermost": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
}


# ---------------------------------------------------------------- named cases

N = 24
MASKS = {
    "full": AttnMask.dense(N),
    "causal": AttnMask.dense(N, causal=True),
    "window": AttnMask.dense(N, window=(4, 2)),
    "causal window": AttnMask.dense(N, causal=True, window=(5, 0)),
    "packed": AttnMask.varlen([0, 5, 5, 6, 17, 24, 24], causal=True),
    "packed window": AttnMask.varlen([0, 9, 24], window=(2, 1)),
    "sink": AttnMask.from_slices([(0, N, 0, 2, -N, 0), (0, N, 2, N, -3, 0)], N, N),
    "rows with no key": AttnMask.from_slices([(3, 9, 12, 20, -N, N), (20, 22, 0, 1, -N, N)], N, N),
    "nothing": AttnMask.from_slices([], N, N),
    "cross": AttnMask.dense(N, 40, causal=True),
    "cross, fewer keys": AttnMask.dense(N, 10, causal=True),
    "one token": AttnMask.dense(1, causal=True),
}
LAYOUTS = {
    "one rank": lambda total: Layout.contiguous(total, 1),
    "contiguous 2": lambda total: Layout.contiguous(total, 2),
    "contiguous 5": lambda total: Layout.contiguous(total, 5),
    "zigzag 3": lambda total: Layout.zigzag(total, 3),
    "zigzag 8": lambda total: Layout.zigzag(total, 8),
    "uneven": lambda total: Layout.from_sizes([0, total - total // 4, 0, total // 4]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("stages", [None, 1, 2])
def test_table(mask, layout, stages):
    plan = make_plan(mask, layout(mask.q_len), layout(mask.k_len), stages=stages)
    check(plan, Shape().draw(mask))


@pytest.mark.parametrize("assignment", ["owner", "balanced", "zigzag"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("strides", STRIDES)
def test_kernels_and_strides(assignment, kernel, strides):
    mask = AttnMask.dense(N, causal=True, window=(9, 0))
    tensors = Shape().draw(mask)
    if reason := KERNELS[kernel].CAPABILITIES.refuses(tensors[0], Scoring(SCALE)):
        pytest.skip(reason)
    plan = make_plan(mask, Layout.contiguous(N, 4), assignment=assignment)
    check(plan, tensors, kernel=kernel, strides=STRIDES[strides])


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_q_and_k_in_different_layouts(stages):
    mask = AttnMask.dense(31, 53, causal=True)
    plan = make_plan(mask, Layout.zigzag(31, 3), Layout.from_sizes([20, 0, 33]), stages=stages)
    check(plan, Shape().draw(mask))


def test_gradient_of_a_sum():
    """Its output gradient is one number expanded over every dim."""
    mask = AttnMask.dense(N, causal=True)
    q, k, v, dout = Shape().draw(mask)
    ones = torch.ones((), dtype=torch.float64).expand_as(dout)
    check(make_plan(mask, Layout.contiguous(N, 4)), [q, k, v, ones])


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


# ------------------------------------------------------- any case (hypothesis)


@st.composite
def masks(draw) -> AttnMask:
    kind = draw(st.sampled_from(["dense", "window", "packed", "slices"]))
    event(f"mask: {kind}")
    if kind == "packed":
        return draw(packed())
    q_len = draw(st.integers(0, 40))
    k_len = draw(st.one_of(st.just(q_len), st.integers(0, 40)))
    if kind == "slices":
        return draw(disjoint_slices(q_len, k_len))
    edge = st.integers(-1, 12)
    window = draw(st.tuples(edge, edge)) if kind == "window" else (-1, -1)
    return AttnMask.dense(q_len, k_len, causal=draw(st.booleans()), window=window)


@st.composite
def packed(draw) -> AttnMask:
    """Documents, some of them empty, the keys now and then of other lengths."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    k_lengths = lengths
    if draw(st.booleans()):
        count = len(lengths)
        k_lengths = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    window = draw(st.sampled_from([(-1, -1), (3, 1), (0, 4)]))
    ends, k_ends = (np.cumsum([0, *values]) for values in (lengths, k_lengths))
    return AttnMask.varlen(ends, k_ends, causal=draw(st.booleans()), window=window)


@st.composite
def disjoint_slices(draw, q_len: int, k_len: int) -> AttnMask:
    """Any slices, less those that meet one before them."""
    taken = np.zeros((q_len, k_len), dtype=bool)
    diagonal = np.arange(k_len)[None, :] - np.arange(q_len)[:, None]
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, q_len), st.integers(0, q_len))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, k_len), st.integers(0, k_len))))
        lo, hi = draw(st.tuples(st.integers(-45, 20), st.integers(-20, 45)))
        pairs = np.zeros_like(taken)
        pairs[q0:q1, k0:k1] = ((diagonal >= lo) & (diagonal <= hi))[q0:q1, k0:k1]
        if not (pairs & taken).any():
            taken |= pairs
            rows.append((q0, q1, k0, k1, lo, hi))
    mask = AttnMask.from_slices(rows, q_len, k_len)
    assert (mask.to_dense() == taken).all()
    return mask


@st.composite
def layouts(draw, total: int, group_size: int) -> Layout:
    kind = draw(st.sampled_from(["contiguous", "zigzag", "sizes"]))
    if kind != "sizes":
        return getattr(Layout, kind)(total, group_size)
    cut = st.integers(0, total)
    cuts = sorted(draw(st.lists(cut, min_size=group_size - 1, max_size=group_size - 1)))
    return Layout.from_sizes(np.diff([0, *cuts, total]).tolist())


@st.composite
def cases(draw) -> tuple[Plan, Shape, str, str]:
    mask = draw(masks())
    group_size = draw(st.sampled_from(range(1, 9)))
    event(f"ranks: {group_size}")
    q_layout = draw(layouts(mask.q_len, group_size))
    same = mask.q_len == mask.k_len and draw(st.booleans())
    plan = make_plan(
        mask,
        q_layout,
        q_layout if same else draw(layouts(mask.k_len, group_size)),
        assignment=draw(st.sampled_from(["owner", "balanced", "zigzag"])),
        stages=draw(st.integers(0, 3)),
    )
    kv_heads = draw(st.integers(1, 2))
    shape = Shape(
        batch=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        d=draw(st.integers(1, 6)),
        e=draw(st.integers(1, 6)),
    )
    kernel = draw(st.sampled_from(["torch", "reference"]))
    return plan, shape, kernel, draw(st.sampled_from(sorted(STRIDES)))


@given(cases())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_case_equals_dense_attention(case):
    plan, shape, kernel, strides = case
    check(plan, shape.draw(plan.mask), kernel=kernel, strides=STRIDES[strides])


# ----------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("assignment", ["owner", "balanced", "zigzag"])
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_are_as_planned(dtype, stages, assignment, batch):
    mask = AttnMask.varlen([0, 30, 37, 80], causal=True)
    plan = make_plan(mask, Layout.from_sizes([0, 40, 10, 30]), assignment=assignment, stages=stages)
    shape = Shape(batch=batch, q_heads=6, kv_heads=2, d=8, e=5)
    _, traffic = run(plan, [t.to(dtype) for t in shape.draw(mask)])
    sizes = (shape.q_heads, shape.kv_heads, shape.d, shape.e, dtype.itemsize)
    forward, backward = plan.forward_bytes(*sizes), plan.backward_bytes(*sizes)
    assert forward.sum() > 0 and backward.sum() > forward.sum()
    assert traffic.forward == (batch * forward).tolist()
    assert traffic.backward == (batch * backward).tolist()


# --------------------------------------------------------------- low precision


def gaussian(t: Tensor) -> Tensor:
    return t


def heavy_tailed(t: Tensor) -> Tensor:
    """Like real activations: a few channels are 30 times larger."""
    t = t.clone()
    t[..., ::11] *= 30
    return t


def errors(got: list[Tensor], want: tuple[Tensor, ...]) -> list[float]:
    """Root mean square error of each result."""
    return [(g.double() - w).square().mean().sqrt().item() for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("values", [gaussian, heavy_tailed])
@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_bf16_is_as_good_as_on_one_device(values, group_size, stages):
    mask = AttnMask.dense(256, causal=True)
    shape = Shape(batch=1, d=32, e=32)
    low = [values(t).bfloat16() for t in shape.draw(mask)]
    exact = [t.double() for t in low]
    want = dense_gradients(*exact[:3], mask, SCALE, exact[3])
    single, _ = run(make_plan(mask, Layout.contiguous(256, 1)), low)
    got, _ = run(make_plan(mask, Layout.contiguous(256, group_size), stages=stages), low)
    limits = [
        2 * error + torch.finfo(g.dtype).eps / 2 * w.square().mean().sqrt().item()
        for error, g, w in zip(errors(single, want), got, want, strict=True)
    ]
    for name, error, limit in zip(NAMES, errors(got, want), limits, strict=True):
        assert error <= limit, f"{name}: error {error:.3e} > {limit:.3e}"
