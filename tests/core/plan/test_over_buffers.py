"""The mask over buffers against painting it pair by pair."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise, to_dense
from customized_ops.ring_attention.core.plan import over_buffers as buffers
from customized_ops.ring_attention.core.plan.exchanges.exchange import NO_RANGES, Exchange
from customized_ops.ring_attention.core.plan.over_buffers import joined_keys, over_buffers

from .plan_cases import disjoint_slices, painted


def tokens_at(places: np.ndarray) -> np.ndarray:
    """The token at each position of a buffer with these places."""
    count = int((places[:, 1] - places[:, 0]).sum())
    return Exchange(NO_RANGES, NO_RANGES, places, count).indices


def check(mask: AttnMask, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """over_buffers, checked: exactly the mask's pairs of tokens that both buffers hold, once."""
    got = over_buffers(mask.slices, rows, keys)
    i, j = tokens_at(rows), tokens_at(keys)
    assert (painted(got, len(i), len(j)) == mask.to_dense()[np.ix_(i, j)]).all()
    assert got.tolist() == normalise(got).tolist(), "tight, and none empty"
    order = [(q0, q1, k0) for q0, q1, k0, *_ in got.tolist()]
    assert order == sorted(order), "by row and then by key"
    return got


@st.composite
def places(draw, total: int) -> np.ndarray:
    """Some of ``total`` tokens in pieces that are in the buffer in any order."""
    bounds = sorted(draw(st.sets(st.integers(0, total), max_size=9)) | {0, total})
    pieces = [pair for pair in itertools.pairwise(bounds) if draw(st.integers(0, 3))]
    order = draw(st.permutations(range(len(pieces))))
    offsets, at = {}, 0
    for n in order:
        offsets[n] = at
        at += pieces[n][1] - pieces[n][0]
    rows = [(*piece, offsets[n]) for n, piece in enumerate(pieces)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@st.composite
def cases(draw):
    q_len, k_len = draw(st.integers(0, 25)), draw(st.integers(0, 25))
    bands = st.tuples(st.integers(-30, 12), st.integers(-12, 30))
    mask = draw(disjoint_slices(q_len, k_len, bands))
    return mask, draw(places(q_len)), draw(places(k_len))


@given(cases())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_buffers(case):
    got = check(*case)
    event(f"slices: {min(len(got), 5)}")
    with mock.patch.object(buffers, "FEW_CUTS", 0):  # as where there are many places
        assert check(*case).tolist() == got.tolist()


def side_by_side(ranges) -> np.ndarray:
    """Places of token ranges that are in the buffer one after the other."""
    table = np.array(ranges, dtype=np.int64).reshape(-1, 2)
    size = table[:, 1] - table[:, 0]
    return np.column_stack([table, np.cumsum(size) - size])


def stripes(total: int, width: int, ranks: int, rank: int) -> np.ndarray:
    """Every ``ranks``-th stripe of ``width`` tokens."""
    return side_by_side([(n, n + width) for n in range(rank * width, total, ranks * width)])


@pytest.mark.parametrize(("q_rank", "k_rank"), [(0, 0), (0, 3), (3, 0), (2, 1)])
def test_stripes_give_few_slices(q_rank, k_rank):
    """64 stripes each: cut at all of them a causal mask would be 64 * 65 / 2 slices."""
    rows, keys = stripes(1024, 4, 4, q_rank), stripes(1024, 4, 4, k_rank)
    got = check(AttnMask.dense(1024, causal=True), rows, keys)
    assert len(rows) == len(keys) == 64
    assert len(got) <= 2 * 64


def test_stripes_are_not_cut_apart_on_the_way(monkeypatch):
    """Nor are there many before neighbours are joined: memory would grow with rows x keys."""
    cut = []

    def counted(slices):
        cut.append(len(slices))
        return joined_keys(slices)

    monkeypatch.setattr(buffers, "joined_keys", counted)
    for mask in (AttnMask.dense(1024), AttnMask.dense(1024, causal=True)):
        check(mask, stripes(1024, 4, 4, 1), stripes(1024, 4, 4, 2))
    assert len(cut) == 2 and max(cut) <= 2 * 64


def test_full_over_stripes_is_a_slice_a_row_place():
    rows, keys = stripes(512, 2, 4, 1), stripes(512, 2, 4, 2)
    got = check(AttnMask.dense(512), rows, keys)
    assert len(got) <= len(rows)


def test_window_over_stripes():
    """A window of 4 stripes of this rank meets a handful of key places a row place."""
    rows, keys = stripes(1024, 4, 4, 1), stripes(1024, 4, 4, 1)
    got = check(AttnMask.dense(1024, causal=True, window=(64, 0)), rows, keys)
    assert len(got) <= 4 * len(rows)


@pytest.mark.parametrize("total", [8, 24])
def test_zigzag_causal_is_two_slices(total):
    """Rank 0 of 2: the first chunk attends itself, the last one the first and itself."""
    chunk = total // 4
    places = side_by_side([(0, chunk), (3 * chunk, total)])
    got = check(AttnMask.dense(total, causal=True), places, places)
    want = [(0, chunk, 0, chunk, -99, 0), (chunk, 2 * chunk, 0, 2 * chunk, -99, 0)]
    assert got.tolist() == normalise(as_slices(want)).tolist()


def test_order_in_the_buffer_is_free():
    """Places in reverse: two shifted diagonals, no slice over the seam."""
    places = np.array([(0, 4, 4), (4, 8, 0)], dtype=np.int64)
    got = check(AttnMask.dense(8, causal=True), places, places)
    assert len(got) == 3


def test_of_nothing():
    mask, none = AttnMask.dense(6), np.zeros((0, 3), dtype=np.int64)
    some = side_by_side([(0, 6)])
    for rows, keys in ((none, some), (some, none), (none, none)):
        assert check(mask, rows, keys).shape == (0, 6)
    assert check(AttnMask.from_slices([], 6, 6), some, some).shape == (0, 6)


# ------------------------------------------------------------------ joined_keys


def bands(q0: int, q1: int, k0: int, k1: int) -> list[list[int]]:
    """Every band in a rectangle that leaves it its rows and keys, and so is normalised as given."""
    rows = []
    for lo, hi in itertools.product(range(k0 - q1 + 1, k1 - q0), repeat=2):
        if lo <= hi:
            tight = normalise(as_slices([(q0, q1, k0, k1, lo, hi)])).tolist()
            if tight == [[q0, q1, k0, k1, lo, hi]]:
                rows += tight
    return rows


@pytest.mark.parametrize("height", [1, 2, 3, 4])
def test_joined_keys_of_any_two_neighbours(height):
    """All pairs of bands side by side over the same rows: joined exactly where one band says
    the same, and always the same pairs."""
    joins = 0
    for width, more in itertools.product((1, 2, 3), repeat=2):
        lefts, rights = bands(0, height, 0, width), bands(0, height, width, width + more)
        wholes = {
            to_dense(as_slices([band]), height, width + more).tobytes()
            for band in bands(0, height, 0, width + more)
        }
        for pair in itertools.product(lefts, rights):
            slices = as_slices(pair)
            want = to_dense(slices, height, width + more)
            got = joined_keys(slices[::-1])
            assert (painted(got, height, width + more) == want).all(), pair
            assert len(got) == (1 if want.tobytes() in wholes else 2), pair
            joins += len(got) == 1
    assert joins >= 9


def test_joined_keys_joins_chains_only_of_the_same_rows():
    square = [(0, 4, k, k + 2, k - 3, k + 1) for k in range(0, 8, 2)]
    assert joined_keys(as_slices(square)).tolist() == [[0, 4, 0, 8, -3, 7]]
    other = normalise(as_slices([*square[:2], (0, 3, 4, 6, -9, 9), *square[3:]]))
    got = joined_keys(other)
    assert len(got) == 3
    assert (to_dense(got, 4, 8) == to_dense(other, 4, 8)).all()
    assert joined_keys(other[:1]).tolist() == other[:1].tolist()
