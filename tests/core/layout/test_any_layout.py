"""Layouts drawn at random, their text, and which of them are equal."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask

from .layout_cases import assert_every_token_is_held_once

numbers = st.integers(0, 200), st.integers(1, 9)


@st.composite
def drawn_documents(draw):
    return [0, *itertools.accumulate(draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))]


@st.composite
def zigzag_layouts(draw):
    cu_seqlens = draw(drawn_documents())
    return Layout.zigzag(cu_seqlens[-1], draw(st.integers(1, 5)), cu_seqlens)


@st.composite
def balanced_layouts(draw):
    mask = AttnMask.varlen(draw(drawn_documents()), causal=draw(st.booleans()))
    return Layout.balanced(mask, draw(st.integers(1, 3)), draw(st.integers(8, 60)))


@st.composite
def chunk_layouts(draw):
    total, group_size, chunk = draw(numbers[0]), draw(numbers[1]), draw(st.integers(1, 50))
    ranks = st.integers(0, group_size - 1)
    chunks = -(-total // chunk)
    assigned = draw(st.lists(ranks, min_size=chunks, max_size=chunks))
    return Layout.from_chunks(total, group_size, chunk, assigned)


@st.composite
def range_layouts(draw):
    cuts = sorted(draw(st.lists(st.integers(0, 100), min_size=2, max_size=12)))
    pairs = list(itertools.pairwise([0, *cuts]))
    ranges = [[] for _ in range(draw(st.integers(1, 4)))]
    for pair in draw(st.permutations(pairs)):
        draw(st.sampled_from(ranges)).append(pair)
    return Layout.from_ranges(ranges)


any_layout = st.one_of(
    st.builds(Layout.contiguous, *numbers),
    st.builds(Layout.zigzag, *numbers),
    st.builds(Layout.striped, *numbers, st.integers(1, 20)),
    st.builds(Layout.from_sizes, st.lists(st.integers(0, 50), min_size=1, max_size=9)),
    zigzag_layouts(),
    balanced_layouts(),
    chunk_layouts(),
    range_layouts(),
)


@given(any_layout)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_layout_tiles_and_its_spec_parses_back(layout):
    assert_every_token_is_held_once(layout)
    again = Layout.parse(layout.spec)
    assert again == layout and again.spec == layout.spec
    assert hash(again) == hash(layout)
    assert Layout.parse(layout.spec) is again


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        (Layout.contiguous(8, 2), "contiguous:8:2"),
        (Layout.zigzag(8, 2), "zigzag:8:2"),
        (Layout.zigzag(8, 2, [0, 3, 8]), "zigzag:8:2:0,3,8"),
        (Layout.striped(8, 2), "striped:8:2:1"),
        (Layout.from_sizes([3, 0, 5]), "sizes:3,0,5"),
        (Layout.from_chunks(7, 3, 2, [2, 0, 2, 0]), "chunks:7:3:2:2,0,2,0"),
        (Layout.balanced(AttnMask.dense(8, causal=True), 2, 2), "chunks:8:2:2:0,1,1,0"),
        (Layout.from_ranges([[(0, 4), (8, 12)], [(4, 8)]]), "ranges:0-4,8-12;4-8"),
    ],
    ids=str,
)
def test_spec(layout, spec):
    assert layout.spec == spec == str(layout)
    assert repr(layout) == f"Layout({spec})"


def test_a_long_spec_is_shown_short():
    layout = Layout.from_sizes(range(100))
    assert len(layout.spec) > 200
    assert repr(layout) == f"Layout({layout.spec[:57]}...)"


def test_equality_is_by_what_ranks_hold():
    assert Layout.contiguous(8, 2) == Layout.from_sizes([4, 4])
    assert hash(Layout.contiguous(8, 2)) == hash(Layout.from_sizes([4, 4]))
    assert Layout.contiguous(8, 2) != Layout.zigzag(8, 2)
    assert Layout.contiguous(8, 2) != Layout.from_sizes([4, 4, 0])
    assert Layout.contiguous(8, 2) != Layout.contiguous(8, 2).ranges
    assert Layout.zigzag(8, 1) == Layout.contiguous(8, 1) == Layout.striped(8, 1)
    assert Layout.from_ranges([[(4, 8), (0, 4)]]) != Layout.from_ranges([[(0, 4), (4, 8)]])
