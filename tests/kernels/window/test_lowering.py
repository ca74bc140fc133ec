"""From slices to window calls."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import WIDE, window_mask

from customized_ops.ring_attention.core.kernels.window.lowering import (
    MOST_GAP,
    TILE,
    WindowCall,
    join,
    lower,
    with_all_keys,
)
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import (
    as_slices,
    clip,
    normalise,
    shift,
    to_dense,
)


def attended(calls, rows, keys):
    """How often each pair is attended, int[rows, keys]; asserts what a call promises."""
    count = np.zeros((rows, keys), dtype=int)
    for call in calls:
        q0, q1, k0, k1 = call.segments.T
        assert (q0 < q1).all() and (k0 < k1).all()
        assert (q1[:-1] <= q0[1:]).all() and (k1[:-1] <= k0[1:]).all()
        assert call.rows == (q0[0], q1[-1]) and call.keys == (k0[0], k1[-1])
        for a, b, c, d in call.segments.tolist():
            count[a:b, c:d] += window_mask(b - a, d - c, call.window).numpy()
    return count


def assert_lowers(slices, rows, keys, **options):
    calls = lower(slices, **options)
    assert (attended(calls, rows, keys) == to_dense(slices, rows, keys)).all()
    return calls


@st.composite
def masks(draw):
    """Any disjoint slices: bands over rectangles, what is taken already left out."""
    rows, keys = draw(st.integers(1, 14)), draw(st.integers(1, 14))
    taken, found = np.zeros((rows, keys), dtype=bool), []
    for _ in range(draw(st.integers(0, 7))):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, keys), st.integers(0, keys))))
        lo = draw(st.one_of(st.just(-WIDE), st.integers(-rows, keys)))
        hi = draw(st.one_of(st.just(WIDE), st.integers(-rows, keys)))
        one = normalise(as_slices([(q0, q1, k0, k1, lo, hi)]))
        cells = to_dense(one, rows, keys)
        if not (cells & taken).any():
            taken |= cells
            found.append(one)
    return np.concatenate([as_slices([]), *found]), rows, keys


@given(masks(), st.booleans(), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_calls_attend_each_pair_once(mask, gaps, wide_right):
    slices, rows, keys = mask
    calls = assert_lowers(slices, rows, keys, gaps=gaps, wide_right=wide_right)
    for call in calls:
        q0, q1, k0, k1 = call.segments.T
        if not gaps:
            assert (q1[:-1] == q0[1:]).all() and (k1[:-1] == k0[1:]).all()
        if not wide_right:
            assert call.window[1] < (k1 - k0).max()
            if call.window[0] >= 0 > call.window[1]:
                assert (q1 - q0).max() <= (k1 - k0).max()


@given(masks())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_join_keeps_pairs_and_bounds_tight(mask):
    slices, rows, keys = mask
    joined = join(slices)
    assert len(joined) <= len(slices)
    assert (normalise(joined) == joined).all()
    count = np.zeros((rows, keys), dtype=int)
    for one in joined:
        count += to_dense(one[None], rows, keys)
    assert (count == to_dense(slices, rows, keys)).all()


def zigzag(rank, ranks, tokens):
    """Causal attention of a rank's two chunks among themselves, counted as the rank holds them."""
    chunk = tokens // (2 * ranks)
    starts = [rank * chunk, (2 * ranks - 1 - rank) * chunk]
    causal = AttnMask.dense(tokens, causal=True).slices
    found = []
    for n, q in enumerate(starts):
        for m, k in enumerate(starts):
            here = clip(causal, q, q + chunk, k, k + chunk)
            found.append(shift(here, n * chunk - q, m * chunk - k))
    return np.concatenate(found), 2 * chunk, 2 * chunk


def of(mask):
    return mask.slices, mask.q_len, mask.k_len


def documents(*rest, **options):
    return of(AttnMask.varlen(*rest, **options))


# What is attended, and windows and numbers of segments of the calls.
KNOWN = {
    "full": (of(AttnMask.dense(9, 14)), [((-1, -1), 1)]),
    "causal": (of(AttnMask.dense(30, causal=True)), [((-1, 0), 1)]),
    "causal, more rows than keys": (of(AttnMask.dense(30, 9, causal=True)), [((-1, 0), 1)]),
    "window": (of(AttnMask.dense(30, window=(7, 3))), [((7, 3), 1)]),
    "a zigzag rank's own chunks": (zigzag(1, 4, 64), [((-1, 0), 1)]),
    "causal, cut by keys": (
        (clip(AttnMask.dense(30, causal=True).slices, 0, 30, 0, 10), 30, 10),
        [((-1, 20), 1)],
    ),
    "documents": (documents([0, 5, 6, 20, 30], causal=True), [((-1, 0), 4)]),
    "documents of one token": (documents(range(9), causal=True), [((-1, -1), 8)]),
    "documents under a window": (
        documents([0, 3, 4, 20, 30], causal=True, window=(6, 0)),
        [((6, 0), 4)],
    ),
    "no slices": ((as_slices([]), 5, 5), []),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_masks(name):
    (slices, rows, keys), want = KNOWN[name]
    calls = assert_lowers(slices, rows, keys)
    assert [(call.window, len(call.segments)) for call in calls] == want


def test_streaming_is_two_calls():
    slices = normalise(as_slices([(0, 30, 0, 30, -5, 0), (0, 30, 0, 3, -WIDE, -6)]))
    windows = [call.window for call in assert_lowers(slices, 30, 30)]
    assert windows == [(5, 0), (-1, 21)]


def test_slices_are_cut_where_that_makes_fewer_calls():
    """Documents whose keys end at different rows: two calls rather than one each."""
    cut = [(a, a + 10, a, a + keys, -WIDE, 0) for a, keys in [(0, 4), (10, 7), (20, 5)]]
    calls = assert_lowers(normalise(as_slices(cut)), 30, 30)
    assert {call.window for call in calls} == {(-1, 0), (-1, -1)}
    assert [len(call.segments) for call in calls] == [3, 3]


def test_without_gaps_segments_touch():
    apart = normalise(as_slices([(0, 4, 0, 4, -WIDE, 0), (4, 9, 5, 10, -WIDE, 1)]))
    assert len(assert_lowers(apart, 9, 10)) == 1
    assert len(assert_lowers(apart, 9, 10, gaps=False)) == 2


@pytest.mark.parametrize("axis", ["rows", "keys"])
def test_wide_gaps_are_not_filled_up(axis):
    def calls(gap):
        q, k = (gap, 0) if axis == "rows" else (0, gap)
        apart = [(0, 4, 0, 4, -WIDE, WIDE), (4 + q, 8 + q, 4 + k, 8 + k, -(1 << 20), 1 << 20)]
        return lower(normalise(as_slices(apart)))

    assert len(calls(MOST_GAP)) == 1
    assert len(calls(MOST_GAP + 1)) == 2


def test_blocks_of_a_staircase_become_one_slice():
    """In any order."""
    blocks = [
        (i, i + 4, j, j + 4, -WIDE, 0) for i in range(0, 32, 4) for j in range(0, 32, 4) if j <= i
    ]
    slices = normalise(as_slices(blocks))
    np.random.default_rng(0).shuffle(slices)
    (call,) = assert_lowers(slices, 32, 32)
    assert call.window == (-1, 0) and len(call.segments) == 1


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=["causal", "window"])
def test_thousands_of_documents_are_one_call_in_no_time(window):
    lengths = np.random.default_rng(0).integers(1, 50, 5000)
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    slices = AttnMask.varlen(ends, causal=True, window=window).slices
    start = time.process_time()  # however busy the machine is
    (call,) = lower(slices)
    seconds = time.process_time() - start
    assert len(call.segments) == 5000
    assert seconds < 0.5  # a tenth of that on an idle core; trying all pairs takes minutes


@given(masks())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_lengths_hold_every_token_of_a_call(mask):
    slices, _, _ = mask
    for call in lower(slices):
        lengths = call.lengths
        ends = np.concatenate([[[0, 0]], np.cumsum(lengths, axis=0)])
        assert ends[-1].tolist() == [np.diff(call.rows)[0], np.diff(call.keys)[0]]
        starts = ends[:-1] + np.array([call.rows[0], call.keys[0]])
        real = (lengths > 0).all(axis=1)
        spans = np.stack([starts, starts + lengths], axis=2)[real].reshape(-1, 4)
        assert (spans == call.segments).all()
        assert (lengths[~real] > 0).sum(axis=1).tolist() == [1] * (~real).sum()
        assert call.skips_rows == (lengths[:, 1] == 0).any()


def test_no_gap_is_longer_than_the_longest_segment_or_a_tile():
    segments = np.array([(0, 2, 0, 300), (1000, 1003, 301, 303)])
    lengths = WindowCall((-1, -1), segments).lengths
    assert lengths.sum(axis=0).tolist() == [1003, 303]
    assert lengths.max(axis=0).tolist() == [TILE, 300]


@given(masks())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_tiles_are_those_attended(mask):
    slices, _, _ = mask
    for call in lower(slices):
        big = WindowCall(
            tuple(bound if bound < 0 else bound * 70 for bound in call.window),
            call.segments * 70,
        )
        want = 0
        for a, b, c, d in big.segments.tolist():
            attended = window_mask(b - a, d - c, big.window).numpy()
            pad = [(0, -length % TILE) for length in attended.shape]
            cut = np.pad(attended, pad).reshape(-(-(b - a) // TILE), TILE, -1, TILE)
            want += cut.any(axis=(1, 3)).sum()
        assert big.tiles == want


def test_tables_of_few_lengths():
    """Calls of about as many segments have tables of one length; what is added is empty."""
    shapes = set()
    for count in range(16, 32):
        bounds = np.arange(count + 1) * 5
        (call,) = lower(AttnMask.varlen(bounds, causal=True).slices)
        table = call.cu_seqlens.values
        shapes.add(table.shape)
        assert (table[:, : count + 1] == bounds).all() and (table[:, count:] == bounds[-1]).all()
    assert shapes == {(2, 32)}


@pytest.mark.parametrize(("first", "count"), [(7, 60), (0, 60), (7, 50), (300, 4000)])
def test_a_call_may_have_the_keys_around_it(first, count):
    """They are segments without rows, none longer than the longest or a tile."""
    slices = shift(AttnMask.varlen([0, 20, 43], causal=True).slices, 0, first)
    (bare,) = lower(slices)
    call = with_all_keys(bare, count)
    assert call.keys == (0, count) and call.rows == (0, 43) and call.tiles == bare.tiles
    assert call.lengths.sum(axis=0).tolist() == [43, count] and call.lengths.max() <= TILE
    starts = np.cumsum(call.lengths, axis=0) - call.lengths
    real = call.lengths[:, 0] > 0
    assert starts[real].tolist() == call.segments[:, ::2].tolist()
    assert call.cu_seqlens.values[1, len(call.lengths)] == count


def test_calls_with_all_keys_and_those_that_leave_out_many_stay_as_they_are():
    (call,) = lower(AttnMask.varlen([0, 20, 43], causal=True).slices)
    assert with_all_keys(call, 43) is call and with_all_keys(call, 44 + MOST_GAP) is call


def test_rows_of_tables_start_at_multiples_of_16_bytes():
    for count in (1, 2, 3, 5, 40):
        (call,) = lower(AttnMask.varlen(np.arange(count + 1) * 5, causal=True).slices)
        values = call.cu_seqlens.values
        assert values.strides[0] % 16 == 0 and values.shape[1] > count
