"""Integer ranges against sets of integers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask.intervals import depth, joined, spread, touched, union


def column(values) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def columns(rows, width: int) -> list[np.ndarray]:
    return list(np.array(rows, dtype=np.int64).reshape(-1, width).T)


any_range = st.tuples(st.integers(-9, 9), st.integers(-9, 9))
full_range = st.tuples(st.integers(-9, 40), st.integers(1, 8)).map(lambda r: (r[0], r[0] + r[1]))
many = settings(max_examples=100, deadline=None, derandomize=True)


@given(st.lists(any_range, max_size=8))
@many
def test_spread(ranges):
    x, n = spread(*columns(ranges, 2))
    want = [(place, m) for place, (first, last) in enumerate(ranges) for m in range(first, last)]
    assert list(zip(x.tolist(), n.tolist(), strict=True)) == want
    assert x.dtype == n.dtype == np.int64


@st.composite
def tilings(draw, gaps: bool = True):
    """Sorted, disjoint ranges that are not empty."""
    at, rows = draw(st.integers(-9, 5)), []
    for length in draw(st.lists(st.integers(1, 6), max_size=8)):
        at += draw(st.integers(0, 3)) if gaps else 0
        rows.append((at, at + length))
        at += length
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


@given(st.lists(full_range, max_size=8), tilings())
@many
def test_touched(ranges, tiles):
    first, last = touched(*columns(ranges, 2), tiles)
    met = [list(range(a, b)) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    want = [
        [n for n, (begin, end) in enumerate(tiles.tolist()) if start < end and begin < stop]
        for start, stop in ranges
    ]
    assert met == want


@given(st.lists(st.tuples(st.integers(0, 3), full_range), max_size=12))
@many
def test_union(rows):
    """Each group's integers, in the fewest ranges, sorted."""
    group, start, stop = columns([(g, *r) for g, r in rows], 3)
    want = []
    for g in range(4):
        held = sorted({n for other, r in rows if other == g for n in range(*r)})
        begins = [n for n in held if n - 1 not in held]
        ends = [n + 1 for n in held if n + 1 not in held]
        want += [[g, begin, end] for begin, end in zip(begins, ends, strict=True)]
    assert union(group, start, stop).tolist() == want


@pytest.mark.parametrize("start", [0, 7, 1 << 30])
def test_union_keeps_groups_apart(start):
    """A group that ends at the last integer, and the next that begins at the first."""
    rows = [(0, start, start + 3), (1, start, start + 1), (1, start + 2, start + 3), (5, start, 9)]
    rows[-1] = (5, start, start + 3)
    assert union(*columns(rows, 3)).tolist() == [list(row) for row in rows]


@given(st.lists(full_range, max_size=8))
@many
def test_depth(ranges):
    want = max((sum(a <= n < b for a, b in ranges) for n in range(-9, 50)), default=0)
    assert depth(*columns(ranges, 2)) == want


@st.composite
def places(draw):
    """Disjoint ranges by start, each with an offset that may or may not go on from the last."""
    rows, offset = [], 0
    for start, stop in draw(tilings()).tolist():
        offset += draw(st.sampled_from([0, 0, 0, 5, -50]))
        rows.append((start, stop, offset))
        offset += stop - start
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def numbering(table: np.ndarray) -> list[tuple[int, int]]:
    """(integer, its other number), in order."""
    return [
        (n, offset + n - start)
        for start, stop, offset in table.tolist()
        for n in range(start, stop)
    ]


@given(places())
@many
def test_joined(table):
    got = joined(table)
    assert numbering(got) == numbering(table)
    pairs = numbering(table)
    breaks = sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in itertools.pairwise(pairs))
    assert len(got) == (breaks + 1 if pairs else 0)


def test_of_nothing():
    none = column([])
    assert [part.tolist() for part in spread(none, none)] == [[], []]
    assert [part.tolist() for part in touched(none, none, np.zeros((0, 2), np.int64))] == [[], []]
    assert union(none, none, none).shape == (0, 3)
    assert joined(np.zeros((0, 3), dtype=np.int64)).shape == (0, 3)
