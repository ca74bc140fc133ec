"""Any pairs through a library that knows windows, here a dense stand-in for one."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import KINDS, WIDE, Library, draw, pairs_of

from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.kernels.adapters import reference
from customized_ops.ring_attention.core.kernels.window import windowed
from customized_ops.ring_attention.core.kernels.window.library_calls import UNLIMITED, CallLimits

SCORING = Scoring(0.35, softcap=1.5)
over_kinds = pytest.mark.parametrize("kind", KINDS)


def check(pairs, q, k, v, dout, dlse=None, scoring=SCORING, library=None, limits=UNLIMITED):
    """Forward and backward equal the reference's; returns the library's calls of the forward."""
    library = library or Library()
    want = reference.forward(ForwardOperands(q, k, v), pairs, scoring, None)
    got = windowed.forward(library.forward, ForwardOperands(q, k, v), pairs, scoring, limits)
    forward_calls = list(library.calls)
    for name, mine, his in zip(("out", "lse"), got, want, strict=True):
        assert_same(name, mine, his)
    rows = (BackwardOperands(dout, q, k, v, *want, dlse), pairs, scoring)
    wanted = reference.backward(*rows, None)
    gradients = windowed.backward(library.backward, *rows, limits)
    for name, mine, his in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        assert_same(name, mine, his)
    assert library.calls == 2 * forward_calls
    return forward_calls


@pytest.mark.covering(1)
@over_kinds
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values(kind, batch, kv_heads):
    rows, keys, slices = KINDS[kind]
    q, k, v, dout, dlse = draw(batch, rows, keys, kv_heads)
    pairs = pairs_of(slices, rows, keys)
    check(pairs, q, k, v, dout)
    check(pairs, q, k, v, dout, dlse)
    check(pairs, q, k, v, dout, dlse, limits=CallLimits(gaps=False, wide_right=False))


@st.composite
def parts_of_a_band(draw):
    """A band over a rectangle, cut into a grid, of which some cells are left out."""
    rows, keys = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    key_cuts = sorted({0, keys, *draw(st.lists(st.integers(0, keys), max_size=3))})
    lo, hi = draw(st.sampled_from([(-WIDE, WIDE), (-WIDE, keys - rows), (-3, 1), (1, WIDE)]))
    cells = [
        (q0, q1, k0, k1, lo, hi)
        for q0, q1 in pairwise(row_cuts)
        for k0, k1 in pairwise(key_cuts)
        if draw(st.booleans()) or draw(st.booleans())
    ]
    return cells, rows, keys


@given(parts_of_a_band(), st.integers(1, 2), st.booleans(), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=30)
def test_parts_of_a_band(mask, batch, gaps, wide_right):
    slices, rows, keys = mask
    q, k, v, dout, dlse = draw(batch, rows, keys)
    limits = CallLimits(gaps, wide_right)
    check(pairs_of(slices, rows, keys), q, k, v, dout, dlse, limits=limits)


def strided(t):
    """Views of the same values that are not contiguous: heads outside tokens, tokens outside batch
    entries, every other token."""
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield t.transpose(0, 1).contiguous().transpose(0, 1)
    yield t.repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.covering(1)
@over_kinds
@pytest.mark.parametrize("way", range(3))
def test_strides_are_free(kind, way):
    rows, keys, slices = KINDS[kind]
    *tensors, dlse = draw(2, rows, keys)
    views = [list(strided(t))[way] for t in tensors]
    assert not any(t.is_contiguous() for t in views)
    check(pairs_of(slices, rows, keys), *views, dlse.transpose(1, 2).contiguous().transpose(1, 2))


def test_a_batch_is_one_call_where_it_lies_end_to_end():
    rows, keys, slices = KINDS["documents"]
    pairs, window = pairs_of(slices, rows, keys), (-1, 0)
    q, k, v, dout, _ = draw(3, rows, keys)
    assert check(pairs, q, k, v, dout) == [(window, 9, (3 * rows, 4, 6))]
    apart = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v, dout)]
    assert check(pairs, *apart) == [(window, 3, (rows, 4, 6))] * 3
    assert check(pairs, q[:1], k[:1], v[:1], dout[:1]) == [(window, 3, (rows, 4, 6))]


def test_one_segment_is_not_packed():
    rows, keys, slices = KINDS["one row"]
    q, k, v, dout, _ = draw(3, rows, keys)
    assert check(pairs_of(slices, rows, keys), q, k, v, dout) == [((-1, -1), 0, (3, 1, 4, 6))]


def test_operands_are_views_and_one_call_of_all_rows_is_returned_as_it_is():
    q, k, v, *_ = draw(1, 15, 15)
    seen = {}

    def attend(given, *_, into):
        assert into is None
        seen["operands"] = [t.data_ptr() for t in given]
        seen["out"], seen["lse"] = given.q[..., :5].clone(), given.q.new_zeros(4, 15)
        return seen["out"], seen["lse"]

    pairs = pairs_of(KINDS["documents"][2], 15, 15)
    out, lse = windowed.forward(attend, ForwardOperands(q, k, v), pairs, SCORING)
    assert seen["operands"] == [t.data_ptr() for t in (q, k, v)]
    assert out.data_ptr() == seen["out"].data_ptr() and lse.data_ptr() == seen["lse"].data_ptr()


def test_what_is_worked_out_once_is_not_again():
    rows, keys, slices = KINDS["documents, gaps"]
    pairs = pairs_of(slices, rows, keys)
    q, k, v, dout, _ = draw(2, rows, keys)
    check(pairs, q, k, v, dout)
    made = dict(pairs._made)
    check(pairs, q, k, v, dout)
    assert pairs._made == made and len(made) == 3  # calls, what they cover, the packing of one


THRICE = 10, 9, [(0, 10, n, n + 2, -WIDE, WIDE) for n in (0, 3, 6)]


@pytest.mark.parametrize("kind", ["streaming", "documents, gaps", "thrice"])
def test_low_precision_results(kind):
    """Up to two parts a row stay in the inputs' dtype; more are merged in fp32, as all lse are."""
    rows, keys, slices = THRICE if kind == "thrice" else KINDS[kind]
    pairs = pairs_of(slices, rows, keys)
    q, k, v, dout, _ = draw(1, rows, keys, dtype=torch.bfloat16)
    out, lse = windowed.forward(Library().forward, ForwardOperands(q, k, v), pairs, SCORING)
    assert out.dtype == (torch.float32 if kind == "thrice" else torch.bfloat16)
    assert lse.dtype == torch.float32
    final = out.to(torch.bfloat16), lse
    operands, rest = BackwardOperands(dout, q, k, v, *final), (pairs, SCORING)
    grads = windowed.backward(Library().backward, operands, *rest)
    assert grads[0].dtype == out.dtype and grads[1].dtype == grads[2].dtype == torch.bfloat16
    want, want_lse = reference.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    assert_same("out", out, want, 0.02)
    assert_same("lse", lse, want_lse, 1e-5)
    wide = BackwardOperands(*(t.float() for t in operands[:6]))
    for name, mine, his in zip(
        ("dq", "dk", "dv"), grads, reference.backward(wide, *rest, None), strict=True
    ):
        assert_same(name, mine, his, 0.02 * max(1.0, his.abs().max().item()))


@pytest.mark.covering(1)
@over_kinds
@pytest.mark.parametrize("batch", [1, 2])
def test_a_library_may_leave_results_to_the_caller(kind, batch):
    rows, keys, slices = KINDS[kind]
    q, k, v, dout, dlse = draw(batch, rows, keys)
    check(pairs_of(slices, rows, keys), q, k, v, dout, dlse, library=Library(writes=False))


def test_results_are_written_where_they_belong():
    """Of the calls that overlap no earlier one, by the library: no copy."""
    rows, keys, slices = KINDS["streaming"]
    pairs = pairs_of(slices, rows, keys)
    q, k, v, dout, _ = draw(1, rows, keys)
    library, given = Library(), []

    def seen(function):
        def call(*args, into, **rest):
            given.append(into)
            return function(*args, into=into, **rest)

        return call

    out, lse = windowed.forward(seen(library.forward), ForwardOperands(q, k, v), pairs, SCORING)
    (first_out, first_lse), second = given
    assert second is None
    assert first_out.data_ptr() == out.data_ptr() and first_lse.data_ptr() == lse.data_ptr()
    given.clear()
    operands = BackwardOperands(dout, q, k, v, out, lse)
    grads = windowed.backward(seen(library.backward), operands, pairs, SCORING)
    assert given[1] == (None, None, None)
    assert [t.data_ptr() for t in given[0]] == [t.data_ptr() for t in grads]


def test_check_notices():
    """A library that ignores its window."""
    rows, keys, slices = KINDS["window"]
    pairs = pairs_of(slices, rows, keys)
    q, k, v, _, _ = draw(1, rows, keys)

    def attend(given, call, scoring, **rest):
        return Library().forward(given, replace(call, window=(-1, 0)), scoring, **rest)

    want, _ = reference.forward(ForwardOperands(q, k, v), pairs, SCORING, None)
    got, _ = windowed.forward(attend, ForwardOperands(q, k, v), pairs, SCORING)
    with pytest.raises(AssertionError, match="out"):
        assert_same("out", got, want)
