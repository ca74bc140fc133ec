"""The executor on in-process ranks against dense attention over the whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense import assert_same, dense_gradients
from executed import LAYOUTS, MASKS, NAMES, PLAIN, SCALE, STRIDES, N, Shape, check, run
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    Request,
    Scoring,
    refusal,
)
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.choose.search import ASSIGNMENTS


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


def global_and_local(tokens: int, globals_: int, window: int) -> AttnMask:
    """The first rows attend everything, everything attends them, and a causal window beside."""
    rows = [
        (0, globals_, 0, tokens, -tokens, tokens),
        (globals_, tokens, 0, globals_, -tokens, tokens),
        (globals_, tokens, globals_, tokens, -window, 0),
    ]
    return AttnMask.from_slices(rows, tokens, tokens)


def tiny_documents(count: int) -> AttnMask:
    """Documents of 1, 2 or 3 tokens."""
    lengths = np.random.default_rng(0).integers(1, 4, count)
    return AttnMask.varlen(np.concatenate([[0], np.cumsum(lengths)]), causal=True)


# name: mask, q layout, k layout (None: as q)
CASES = {
    "slices one key wide": (
        AttnMask.from_slices([(n, 40, n, n + 1, -40, 40) for n in range(0, 40, 3)], 40, 40),
        Layout.contiguous(40, 4),
        None,
    ),
    "slices one row high": (
        AttnMask.from_slices([(n, n + 1, 39 - n, 40, -40, 40) for n in range(0, 40, 3)], 40, 40),
        Layout.zigzag(40, 4),
        None,
    ),
    "ranges shorter than a rank": (
        AttnMask.varlen([0, 1, 3, 4, 9, 11, 12, 40], causal=True),
        Layout.contiguous(40, 2),
        None,
    ),
    "tiny documents": (tiny_documents(60), Layout.zigzag(tiny_documents(60).q_len, 8), None),
    "slices share rows": (
        AttnMask.from_slices(
            [
                (0, 30, 0, 6, -40, 40),
                (4, 40, 6, 20, -40, 0),
                (10, 25, 30, 36, 7, 21),
                (8, 36, 38, 40, -40, 40),
            ],
            40,
            40,
        ),
        Layout.contiguous(40, 4),
        None,
    ),
    "all rows of a rank attend nothing": (
        AttnMask.from_slices([(0, 10, 0, 40, -40, 40), (20, 40, 5, 25, -40, 40)], 40, 40),
        Layout.contiguous(40, 4),
        None,
    ),
    "no keys of a rank are attended": (
        AttnMask.from_slices([(0, 40, 10, 40, -40, 40)], 40, 40),
        Layout.contiguous(40, 4),
        None,
    ),
    "everything on one rank": (
        AttnMask.dense(40, causal=True),
        Layout.from_sizes([0, 0, 40, 0]),
        None,
    ),
    "queries on one rank, keys on another": (
        AttnMask.dense(40, 30),
        Layout.from_sizes([0, 0, 40, 0]),
        Layout.from_sizes([30, 0, 0, 0]),
    ),
    "few queries": (AttnMask.dense(6, 90), Layout.contiguous(6, 4), Layout.contiguous(90, 4)),
    "few queries, other layouts": (
        AttnMask.dense(6, 90, causal=True),
        Layout.from_sizes([1, 0, 5, 0]),
        Layout.zigzag(90, 4),
    ),
    "global rows": (global_and_local(64, 2, 5), Layout.contiguous(64, 4), None),
    "global rows, zigzag": (global_and_local(64, 3, 9), Layout.zigzag(64, 8), None),
}


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


# Heads that do not divide evenly, and key heads that several ranks of a team share.
SPLITS = {
    "6:3 in 2": ((6, 3), 2, 4),
    "4:1 in 2": ((4, 1), 2, 4),
    "4:1 in 4": ((4, 1), 4, 4),
    "8:2 in 4": ((8, 2), 4, 8),
    "5:5 in 2": ((5, 5), 2, 2),
    "5:5 in 3": ((5, 5), 3, 3),
    "6:2 in 3": ((6, 2), 3, 6),
    "12:4 in 8": ((12, 4), 8, 8),
}
over_splits = pytest.mark.parametrize(
    ("heads", "team_size", "ranks"), SPLITS.values(), ids=list(SPLITS)
)


@pytest.mark.covering(1)
@over_splits
@pytest.mark.parametrize("assignment", ["owner", "balanced", "nearest"])
@pytest.mark.parametrize("stages", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["causal", "global rows", "few queries"])
def test_heads_in_uneven_shares(name, stages, assignment, heads, team_size, ranks):
    masks = {"global rows": global_and_local(64, 2, 5), "few queries": AttnMask.dense(6, 90)}
    mask = masks.get(name, AttnMask.dense(N, causal=True))
    layouts = Layout.zigzag(mask.q_len, ranks), Layout.contiguous(mask.k_len, ranks)
    options = {"assignment": assignment, "team_size": team_size, "heads": heads}
    plan = make_plan(mask, *layouts, stages=stages, **options)
    check(plan, Shape(2, *heads).draw(mask))


@pytest.mark.covering(1)
@over_splits
@pytest.mark.parametrize("assignment", ["balanced", "nearest"])
def test_scoring_knows_the_heads_at_hand(assignment, heads, team_size, ranks):
    """Slopes and random numbers are those of the head, whoever computes it."""
    mask = global_and_local(64, 2, 5)
    layout = Layout.contiguous(64, ranks)
    options = {"assignment": assignment, "team_size": team_size, "heads": heads}
    plan = make_plan(mask, layout, **options)
    dropout = {"dropout_p": 0.4, "dropout_seed": SEED}
    scoring = Scoring(SCALE, alibi_slopes=slopes(2, heads[0]), **dropout)
    check(plan, Shape(2, *heads).draw(mask), scoring, kernel="reference")


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


# --------------------------------------------------------------------- scoring


def slopes(batch: int, heads: int) -> Tensor:
    """fp32 [batch, heads], all different; multiples of 1/64, so that fp32 holds slope x distance
    exactly and it does not matter where it is widened."""
    return (torch.arange(batch * heads, dtype=torch.float32) + 1).view(batch, heads) / 64


SEED = torch.tensor([0x1234_5678_9ABC])
SCORINGS = {
    "softcap": Scoring(SCALE, softcap=0.8),
    "alibi": Scoring(SCALE, alibi_slopes=slopes(1, 4)),
    "alibi of each batch entry": Scoring(SCALE, alibi_slopes=slopes(2, 4)),
    "dropout": Scoring(SCALE, dropout_p=0.3, dropout_seed=SEED),
    "all": Scoring(SCALE, 1.5, slopes(2, 4), dropout_p=0.5, dropout_seed=SEED),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("assignment", ["balanced", "nearest"])
@pytest.mark.parametrize("team_size", [1, 2])
@pytest.mark.parametrize("stages", [0, 2])
def test_scoring_knows_the_tokens_at_hand(scoring, assignment, team_size, stages):
    """Distances and random numbers go by global places, whoever computes them."""
    for name in ("few queries, other layouts", "global rows"):
        mask, q_layout, k_layout = CASES[name]
        options = {"assignment": assignment, "team_size": team_size, "heads": (4, 2)}
        plan = make_plan(mask, q_layout, k_layout, stages=stages, **options)
        assert plan.shared_rows == (assignment == "nearest")
        check(plan, Shape().draw(mask), scoring, kernel="reference")


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("team_size", [1, 4])
def test_alibi_from_given_positions(kernel, team_size):
    """Keys may stand anywhere, as positions that start again in each document do."""
    mask = AttnMask.varlen([0, 13, 40], [0, 20, 50])
    positions = torch.cat([torch.arange(20) - 7, torch.arange(30) + 10])
    layouts = Layout.zigzag(40, 4), Layout.contiguous(50, 4)
    plan = make_plan(mask, *layouts, stages=1, heads=(8, 4), team_size=team_size)
    scoring = Scoring(SCALE, alibi_slopes=slopes(2, 8))
    tensors = Shape(q_heads=8, kv_heads=4).draw(mask)
    check(plan, tensors, scoring, positions, kernel=kernel)


# -------------------------------------------- keys that arrive in groups of heads

# Query heads and key heads, and groups of them: even, uneven, of one key head, all alike.
GROUPS = {"8:4 in 2": ((8, 4), 2), "6:3 in 2": ((6, 3), 2), "8:4 in 4": ((8, 4), 4)}
over_groups = pytest.mark.parametrize(("heads", "head_groups"), GROUPS.values(), ids=GROUPS)


@pytest.mark.covering(2)
@over_groups
@pytest.mark.parametrize("mask", ["full", "causal", "packed", "cross", "rows with no key"])
@pytest.mark.parametrize("layout", ["contiguous 2", "zigzag 3", "uneven"])
@pytest.mark.parametrize("stages", [0, 1, 2])
def test_keys_in_groups_of_heads(mask, layout, stages, heads, head_groups):
    mask, shape = MASKS[mask], Shape(1, *heads)
    options = {"heads": heads, "stages": stages, "head_groups": head_groups}
    plan = make_plan(mask, LAYOUTS[layout](mask.q_len), LAYOUTS[layout](mask.k_len), **options)
    assert plan.head_groups == (head_groups if plan.keys_move else 1)
    check(plan, shape.draw(mask))


@pytest.mark.thin(4)
@over_groups
@pytest.mark.parametrize("assignment", ["balanced", "nearest"])
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_groups_of_heads_where_rows_move(kernel, stages, assignment, heads, head_groups):
    for mask, q_layout, k_layout in (CASES["global rows, zigzag"], CASES["slices share rows"]):
        options = {"assignment": assignment, "heads": heads, "head_groups": head_groups}
        plan = make_plan(mask, q_layout, k_layout, stages=stages, **options)
        assert plan.rows_move and plan.head_groups == head_groups
        check(plan, Shape(2, *heads).draw(mask), kernel=kernel)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("stages", [0, 1])
def test_scoring_knows_the_heads_of_a_group(scoring, stages):
    """Slopes and random numbers are those of the head in the whole."""
    mask, heads = MASKS["causal"], (4, 2)
    plan = make_plan(mask, Layout.zigzag(N, 3), heads=heads, stages=stages, head_groups=2)
    check(plan, Shape(2, *heads).draw(mask), scoring, kernel="reference")


def test_a_plan_in_groups_serves_fewer_key_heads():
    mask = MASKS["causal"]
    plan = make_plan(mask, Layout.contiguous(N, 3), heads=(8, 8), head_groups=8)
    for heads in ((8, 8), (6, 3), (4, 1)):
        check(plan, Shape(1, *heads).draw(mask))


@pytest.mark.covering(1)
@over_groups
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_move_the_bytes_of_the_whole(dtype, stages, heads, head_groups):
    shape, layout = Shape(2, *heads, d=8, e=5), Layout.from_sizes([0, 40, 10, 30])
    for mask in (AttnMask.varlen([0, 30, 37, 80], causal=True), global_and_local(80, 2, 6)):
        options = {"heads": heads, "head_groups": head_groups, "assignment": "balanced"}
        plan = make_plan(mask, layout, stages=stages, **options)
        _, traffic = run(plan, [t.to(dtype) for t in shape.draw(mask)])
        sizes = (*heads, shape.d, shape.e, dtype.itemsize)
        assert traffic.forward == (2 * plan.forward_bytes(*sizes)).tolist()
        assert traffic.backward == (2 * plan.backward_bytes(*sizes)).tolist()


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
def masks_of_few_rows(draw) -> AttnMask:
    """Some rows or all attend many more keys than there are such rows: they go to the keys."""
    if draw(st.booleans()):
        tokens = draw(st.integers(32, 64))
        return global_and_local(tokens, draw(st.integers(1, 3)), draw(st.integers(0, 6)))
    return AttnMask.dense(draw(st.integers(1, 6)), draw(st.integers(30, 60)))


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


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@st.composite
def plans(draw) -> tuple[Plan, Shape]:
    group_size = draw(st.sampled_from([1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]))
    rows_move = group_size > 1 and draw(st.booleans())
    mask = draw(masks_of_few_rows() if rows_move else masks())
    q_layout = draw(layouts(mask.q_len, group_size))
    same = mask.q_len == mask.k_len and draw(st.booleans())
    k_layout = q_layout if same else draw(layouts(mask.k_len, group_size))
    team = draw(st.sampled_from(divisors(group_size)))
    kv_heads = draw(st.integers(1, 5))
    least = -(-team // kv_heads)  # query heads of a key head, so that each of a team has one
    shape = Shape(
        batch=draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.integers(least, max(least, 2))),
        d=draw(st.integers(1, 6)),
        e=draw(st.integers(1, 6)),
    )
    team_size = draw(st.sampled_from([team, team, None]))
    head_groups = draw(st.integers(1, kv_heads)) if team_size == 1 else None
    plan = make_plan(
        mask,
        q_layout,
        k_layout,
        assignment=draw(st.sampled_from(["nearest", "auto"] if rows_move else list(ASSIGNMENTS))),
        stages=draw(st.integers(0, 3)),
        heads=shape.heads,
        team_size=team_size,
        head_groups=head_groups,
    )
    event(f"groups of heads: {plan.head_groups}")
    event(f"ranks: {group_size}")
    event(f"ranks of a team: {plan.team_size}")
    event(f"shares differ: {shape.q_heads % plan.team_size > 0}")
    event(f"key heads are shared: {shape.kv_heads < plan.team_size}")
    event(f"rows move: {bool(plan.q_tokens().any())}, keys move: {bool(plan.kv_tokens().any())}")
    event(f"rows of several teams: {plan.shared_rows}, teams: {plan.team_size > 1}")
    return plan, shape


@st.composite
def scorings(draw, shape: Shape) -> Scoring:
    """Any mix of softcap, ALiBi and dropout, half of the time none."""
    if draw(st.booleans()):
        return PLAIN
    of_batch = draw(st.sampled_from([None, 1, shape.batch]))
    scoring = Scoring(
        SCALE,
        softcap=draw(st.sampled_from([0.0, 0.7])),
        alibi_slopes=None if of_batch is None else slopes(of_batch, shape.q_heads),
        dropout_p=draw(st.sampled_from([0.0, 0.25])),
        dropout_seed=torch.tensor([draw(st.integers(-(2**63), 2**63 - 1))]),
    )
    event(f"scoring: {', '.join(scoring.features) or 'plain'}")
    return scoring


@given(plans(), st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_case_equals_dense_attention(case, data):
    check_drawn(case, data)


@pytest.mark.slow
@given(plans(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_many_cases_equal_dense_attention(case, data):
    check_drawn(case, data)


def check_drawn(case, data):
    plan, shape = case
    scoring = data.draw(scorings(shape))
    tensors = shape.draw(plan.mask)
    able = [n for n in ("torch", "reference") if not refuses(n, tensors, scoring)]
    positions = None
    if scoring.alibi_slopes is not None and data.draw(st.booleans()):
        draw = torch.Generator().manual_seed(1)
        positions = torch.randint(-9, 60, (plan.mask.k_len,), generator=draw)
    check(
        plan,
        tensors,
        scoring,
        positions,
        kernel=data.draw(st.sampled_from(able)),
        strides=STRIDES[data.draw(st.sampled_from(sorted(STRIDES)))],
    )


def refuses(kernel: str, tensors: list[Tensor], scoring: Scoring) -> str | None:
    (q, k, v), features = tensors[:3], scoring.features
    heads = q.shape[2], k.shape[2]
    request = Request(q.device, q.dtype, q.shape[-1], v.shape[-1], *heads, features)
    return refusal(KERNELS[kernel], request)


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


def assert_as_good(plan: Plan, shape: Shape, values) -> None:
    """In bf16: at most twice the errors of one device, plus rounding."""
    mask = plan.mask
    low = [values(t).bfloat16() for t in shape.draw(mask)]
    exact = [t.double() for t in low]
    want = dense_gradients(*exact[:3], mask, SCALE, exact[3])
    alone = Layout.contiguous(mask.q_len, 1), Layout.contiguous(mask.k_len, 1)
    single, _ = run(make_plan(mask, *alone), low)
    got, _ = run(plan, low)
    limits = [
        2 * error + torch.finfo(g.dtype).eps / 2 * w.square().mean().sqrt().item()
        for error, g, w in zip(errors(single, want), got, want, strict=True)
    ]
    for name, error, limit in zip(NAMES, errors(got, want), limits, strict=True):
        assert error <= limit, f"{name}: error {error:.3e} > {limit:.3e}"


over_values = pytest.mark.parametrize("values", [gaussian, heavy_tailed])


@pytest.mark.covering(1)
@over_values
@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("team_size", [1, 2])
def test_bf16_is_as_good_as_on_one_device(values, group_size, stages, team_size):
    mask, layout = AttnMask.dense(256, causal=True), Layout.contiguous(256, group_size)
    options = {"assignment": "balanced", "stages": stages, "team_size": team_size}
    assert_as_good(make_plan(mask, layout, **options), Shape(batch=1, d=32, e=32), values)


@pytest.mark.covering(1)
@over_values
@pytest.mark.parametrize("group_size", [2, 8])
@pytest.mark.parametrize("stages", [0, 2])
def test_bf16_rows_merged_at_home_are_as_good(values, group_size, stages):
    """All partial results but the home's own travel in bf16."""
    mask = AttnMask.dense(32, 1024)
    layouts = Layout.contiguous(32, group_size), Layout.contiguous(1024, group_size)
    options = {"assignment": "nearest", "stages": stages, "heads": (4, 2)}
    plan = make_plan(mask, *layouts, **options)
    assert plan.shared_rows
    assert_as_good(plan, Shape(batch=1, d=32, e=32), values)


def test_parts_are_merged_at_home_before_they_are_rounded():
    """Seven parts that bf16 holds exactly: their mean is rounded once, by half a unit at most."""
    q_layout, k_layout = Layout.from_sizes([2, 0, 0, 0, 0, 0, 0]), Layout.contiguous(7 * 16, 7)
    mask = AttnMask.dense(2, 7 * 16)
    plan = make_plan(mask, q_layout, k_layout, assignment="nearest", heads=(1, 1))
    assert plan.shared_rows and (plan.area == 2 * 16).all()
    source = torch.Generator().manual_seed(0)
    values = 1 + torch.randint(0, 128, (7, 64), generator=source) / 128
    v = values.repeat_interleave(16, dim=0).view(1, 7 * 16, 1, 64).bfloat16()
    q, k = v.new_zeros(1, 2, 1, 4), v.new_zeros(1, 7 * 16, 1, 4)
    (out, *_), _ = run(plan, [q, k, v, v.new_zeros(1, 2, 1, 64)])
    assert out.dtype == torch.bfloat16
    assert_same("out", out, values.mean(0).expand(1, 2, 1, 64), 2**-8 + 1e-6)
