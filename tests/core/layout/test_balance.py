"""Chunks assigned to ranks: work that is counted, even, and not below the bound."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.layout.balance import (
    CHUNK_TOLERANCE,
    Certificate,
    assign,
    certify,
    chunk_work,
    crossing,
    least_maximum,
)
from customized_ops.ring_attention.core.mask import AttnMask

from .balance_cases import assert_even_counts, cuts_of, imbalance, pairs_before


def largest(areas, rank_of, group_size):
    return np.bincount(rank_of, weights=areas, minlength=group_size).max()


def even_assignments(n, group_size):
    """Every way to assign n chunks so that ranks hold the same number, up to one."""
    for rank_of in itertools.product(range(group_size), repeat=n):
        counts = [rank_of.count(rank) for rank in range(group_size)]
        if max(counts) - min(counts) <= 1:
            yield np.array(rank_of)


def test_assert_even_counts_can_fail():
    with pytest.raises(AssertionError):
        assert_even_counts(np.array([0, 0, 1]), 3)
    with pytest.raises(AssertionError):
        assert_even_counts(np.array([0, 2]), 2)


MASKS = {
    "nothing": AttnMask.from_slices([], 40, 40),
    "full": AttnMask.dense(40),
    "causal": AttnMask.dense(41, causal=True),
    "window": AttnMask.dense(50, window=(7, 2)),
    "sink": AttnMask.from_slices([(0, 45, 0, 4, -99, 0), (4, 45, 4, 45, -6, 0)], 45, 45),
    "documents": AttnMask.varlen([0, 1, 1, 14, 30, 37, 48], causal=True),
}


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("name", MASKS)
def test_chunk_work_counts_pairs(name, chunk):
    mask = MASKS[name]
    areas, need = chunk_work(mask.slices, mask.q_len, chunk)
    bounds = cuts_of(mask.q_len, chunk)
    dense = mask.to_dense()
    for a, b in itertools.product(range(len(areas)), repeat=2):
        block = dense[bounds[a] : bounds[a + 1], bounds[b] : bounds[b + 1]]
        assert need[a, b] == block.any()
    rows = dense.sum(axis=1)
    assert areas.tolist() == [rows[a:b].sum() for a, b in itertools.pairwise(bounds)]


def test_chunk_work_in_batches(monkeypatch):
    mask = MASKS["documents"]
    areas, need = chunk_work(mask.slices, mask.q_len, 4)
    for rows in (1, 3, 5):
        monkeypatch.setattr("customized_ops.ring_attention.core.layout.balance.BATCH_ROWS", rows)
        again_areas, again_need = chunk_work(mask.slices, mask.q_len, 4)
        assert np.array_equal(areas, again_areas) and np.array_equal(need, again_need)


def test_chunk_work_of_many_documents():
    total, chunk = 1 << 20, 512
    mask = AttnMask.varlen(range(0, total + 1, 256), causal=True)
    start = time.process_time()  # however busy the machine is
    areas, need = chunk_work(mask.slices, total, chunk)
    assert time.process_time() - start < 5  # seconds; 0.03 where measured
    some = np.arange(0, len(areas), 100)
    want = pairs_before(mask, (some + 1) * chunk) - pairs_before(mask, some * chunk)
    assert areas[some].tolist() == want.tolist()
    assert np.array_equal(need, np.eye(len(areas), dtype=bool))


def test_crossing_counts_a_chunk_once_per_rank():
    need = np.tril(np.ones((4, 4), dtype=bool))
    tokens = np.array([10, 10, 10, 5])
    assert crossing(need, tokens, np.array([0, 0, 1, 1]), 2) == 20
    assert crossing(need, tokens, np.array([0, 1, 1, 0]), 2) == 10 + 20
    assert crossing(need, tokens, np.array([1, 0, 0, 0]), 3) == 10
    assert crossing(3 * need, tokens, np.array([0, 0, 1, 1]), 2) == 60


def test_imbalance():
    assert imbalance(np.array([3, 1, 2, 2]), np.array([0, 0, 1, 1]), 2) == 1.0
    assert imbalance(np.array([3, 1, 2, 2]), np.array([0, 1, 0, 1]), 2) == 5 / 4
    assert imbalance(np.array([3, 1]), np.array([0, 0]), 4) == 4.0
    assert imbalance(np.zeros(3), np.array([0, 1, 2]), 3) == 1.0


def best_maximum(areas, group_size):
    return min(
        largest(areas, rank_of, group_size) for rank_of in even_assignments(len(areas), group_size)
    )


def assign_with_all_needed(areas, group_size):
    """The assignment where every chunk needs every other."""
    n = len(areas)
    return assign(areas, np.ones((n, n), dtype=bool), np.ones(n, dtype=np.int64), group_size)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_small_assignment_is_below_the_bound(areas, group_size):
    areas = np.array(areas)
    assert least_maximum(areas, group_size) <= best_maximum(areas, group_size)


@pytest.mark.parametrize(("n", "high", "per_rank"), [(64, 80, 8), (128, 80, 16)])
def test_eight_ranks_are_within_one_percent(n, high, per_rank):
    for seed in range(10):
        areas = np.random.default_rng(seed).integers(1, high, n)
        even = assign_with_all_needed(areas, 8)
        assert np.bincount(even, minlength=8).tolist() == [per_rank] * 8
        assert imbalance(areas, even, 8) <= 1.01


@pytest.mark.parametrize("scale", [1, 0.37])
def test_certificates(scale):
    areas = scale * np.array([6, 5, 5, 4, 4, 4])
    rank_of = np.array([0, 0, 0, 1, 1, 1])
    uneven = certify(areas, rank_of, 2)
    assert not uneven.within_one_percent and not uneven.proven_best and not uneven.good
    assert (uneven.largest, uneven.mean, uneven.least) == pytest.approx(
        (16 * scale, 14 * scale, 14 * scale), rel=1e-6
    )
    assert certify(areas, np.array([0, 1, 1, 0, 0, 1]), 2).within_one_percent
    # 9 and 5 are far apart, but 7 each cannot be.
    best = certify(scale * np.array([7, 4, 1, 1]), np.array([0, 1, 1, 0]), 2)
    assert best.proven_best and not best.within_one_percent and best.good
    nothing = certify(np.zeros(3), np.array([0, 1, 2]), 3)
    assert nothing == Certificate(0, 0, 0, True, True)


def test_seven_chunks_get_the_best_assignment():
    areas = np.array([9, 7, 5, 5, 3, 3, 1])
    rank_of = assign_with_all_needed(areas, 3)
    assert largest(areas, rank_of, 3) == best_maximum(areas, 3)


def test_an_assignment_that_is_neither_even_nor_proven_warns():
    """Documents of unlike lengths, chunks as long as some."""
    cu_seqlens = [0, 160, 260, 350, 430, 440, 470]
    mask = AttnMask.varlen(cu_seqlens, causal=True)
    with pytest.warns(UserWarning, match=r"above the mean of .* need at least") as told:
        Layout.balanced(mask, 3, 60)
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.parametrize(
    ("areas", "group_size", "bound"),
    [
        ([6, 1, 1, 4], 2, 7),  # the largest chunk has company
        ([5, 5, 5, 1, 1, 1], 2, 11),  # two of the three large ones share a rank, with a small one
        ([5, 5, 5, 1, 1, 1, 1, 1], 2, 12),  # ... with two small ones
        ([4, 4, 4, 2, 2, 2], 4, 6),  # 4.5, as a multiple of 2
        ([0, 0], 2, 0),
        ([], 2, 0),
    ],
)
def test_least_maximum(areas, group_size, bound):
    assert least_maximum(np.array(areas, dtype=np.int64), group_size) == bound


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_assignment_is_even_and_not_below_the_bound(areas, group_size, seed):
    areas, n = np.array(areas), len(areas)
    need = np.random.default_rng(seed).random((n, n)) < 0.3
    rank_of = assign(areas, need, np.full(n, 2), group_size)
    assert_even_counts(rank_of, group_size)
    got = largest(areas, rank_of, group_size)
    assert got >= least_maximum(areas, group_size)
    in_order = np.arange(n) * group_size // n
    mean = areas.sum() / group_size
    assert got <= max(largest(areas, in_order, group_size), (1 + CHUNK_TOLERANCE) * mean)
