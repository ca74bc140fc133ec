"""Block lists and row intervals against the dense mask."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_strategy import UNBOUNDED, grids_of_bands

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.core.kernels.window.block_lists import (
    block_lists,
    blocks_touched,
    intervals_in_part,
    row_intervals,
)
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise, to_dense

MANY = settings(deadline=None, derandomize=True, max_examples=120)


def assert_lists(side, partial, full):
    """``partial`` and ``full``: bool[blocks, blocks of the other side]."""
    for name, found, want in (("partial", side.partial, partial), ("full", side.full, full)):
        assert found.counts.dtype == found.indices.dtype == np.int32
        assert found.counts.tolist() == want.sum(1).tolist(), name
        assert found.indices.shape == (len(want), max(1, want.sum(1).max(initial=0))), name
        for n, (count, indices) in enumerate(zip(found.counts, found.indices, strict=True)):
            assert indices[:count].tolist() == np.flatnonzero(want[n]).tolist(), (name, n)
            assert not indices[count:].any(), (name, n)


def assert_block_lists(slices, rows, keys, block_q, block_k):
    dense = to_dense(slices, rows, keys)
    i, j = range(0, rows, block_q), range(0, keys, block_k)
    blocks = [[dense[a : a + block_q, b : b + block_k] for b in j] for a in i]
    some = np.array([[block.any() for block in line] for line in blocks])
    full = np.array([[block.all() for block in line] for line in blocks])
    of_rows, of_keys = block_lists(slices, rows, keys, block_q, block_k)
    assert_lists(of_rows, some & ~full, full)
    assert_lists(of_keys, (some & ~full).T, full.T)
    part, whole = blocks_touched(slices, rows, keys, block_q, block_k)
    assert part + whole >= some.sum() and whole <= full.sum()
    if len(slices) == 1:
        assert (part, whole) == ((some & ~full).sum(), full.sum())


@given(grids_of_bands(40, 40), st.integers(1, 12), st.integers(1, 12))
@MANY
def test_block_lists(drawn, block_q, block_k):
    assert_block_lists(*drawn, block_q, block_k)


def test_several_slices_make_a_block_full():
    cut = as_slices([(0, 4, 0, 3, -UNBOUNDED, 0), (0, 4, 1, 3, 1, UNBOUNDED), (0, 3, 3, 8, -9, 9)])
    slices = normalise(np.concatenate([cut, as_slices([(3, 4, 3, 8, -9, 9)])]))
    (of_rows, _) = block_lists(slices, 4, 8, 4, 4)
    assert of_rows.full.indices.tolist() == [[0, 1]] and not of_rows.partial.counts.any()


def test_no_slices():
    nothing = as_slices([])
    of_rows, of_keys = block_lists(nothing, 10, 20, 4, 8)
    assert [len(side.full.counts) for side in (of_rows, of_keys)] == [3, 3]
    assert not any(side.partial.counts.any() for side in (of_rows, of_keys))
    assert row_intervals(nothing, 10, 4).tolist() == [[[0, 0]]] * 10
    assert blocks_touched(nothing, 10, 20, 4, 8) == (0, 0)


@given(grids_of_bands(40, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
@MANY
def test_intervals_in_part(drawn, block_q, block_k, most):
    """All keys of a row in the blocks that are attended in part, and none that it does not attend
    in any."""
    slices, rows, keys = drawn
    of_rows, _ = block_lists(slices, rows, keys, block_q, block_k)
    found = intervals_in_part(slices, rows, of_rows, block_q, block_k, most)
    if found is None:
        assert row_intervals(slices, rows, most) is None and of_rows.partial.counts.any()
        return
    told = np.zeros((rows, keys), dtype=bool)
    for row, intervals in enumerate(found):
        for start, stop in intervals:
            told[row, start:stop] = True
    dense = to_dense(slices, rows, keys)
    assert found.shape[1] <= most and not (told & ~dense).any()
    for i, (count, indices) in enumerate(zip(*vars(of_rows.partial).values(), strict=True)):
        for j in indices[:count]:
            at = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
            assert (told[at] == dense[at]).all()


def test_whole_blocks_need_no_intervals():
    chosen = np.indices((8, 40)).sum(0) % 2 == 0
    slices = AttnMask.from_block_mask(chosen, 4).slices
    of_rows, _ = block_lists(slices, 32, 160, 4, 4)
    assert row_intervals(slices, 32, 8) is None
    assert not intervals_in_part(slices, 32, of_rows, 4, 4, 8).any()
    # A causal edge is told of, whatever else the row attends.
    cut = np.concatenate([slices, as_slices([(0, 4, 4, 8, -UNBOUNDED, 4)])])
    of_rows, _ = block_lists(cut, 32, 160, 4, 4)
    told = intervals_in_part(cut, 32, of_rows, 4, 4, 8)
    assert [row.tolist() for row in told[:5]] == [[[4, n]] for n in (5, 6, 7, 8)] + [[[0, 0]]]


def intervals_of(line):
    """Ascending (start, stop) of the runs of True in bool[keys]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(int), [0]])))
    return edges.reshape(-1, 2).tolist()


@given(grids_of_bands(30, 30), st.integers(1, 5))
@MANY
def test_row_intervals(drawn, most):
    slices, rows, keys = drawn
    want = [intervals_of(line) for line in to_dense(slices, rows, keys)]
    needed = max(1, max(map(len, want)))
    found = row_intervals(slices, rows, most)
    if needed > most:
        assert found is None
        return
    assert found.dtype == np.int32 and found.shape == (rows, needed, 2)
    padded = [line + [[0, 0]] * (needed - len(line)) for line in want]
    assert found.tolist() == padded


def causal(tokens):
    return [(0, tokens, 0, tokens, -UNBOUNDED, 0)]


def documents(tokens):
    cuts = np.linspace(0, tokens, 2001).astype(int).tolist()
    return [(a, b, a, b, -UNBOUNDED, 0) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("make", [causal, documents])
def test_long_masks_take_well_under_a_second(make):
    tokens = 1 << 17
    slices = normalise(as_slices(make(tokens)))

    def seconds():
        start = time.process_time()  # however busy the machine is
        block_lists(slices, tokens, tokens, 128, 128)
        row_intervals(slices, tokens, 8)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.8
