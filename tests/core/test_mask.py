import itertools

import numpy as np
import pytest

from customized_ops.ring_attention.core.mask import AttnMask, MaskError, first_overlap
from customized_ops.ring_attention.core.slices import (
    HI,
    K0,
    K1,
    LO,
    Q0,
    Q1,
    UNBOUNDED,
    area_before,
    areas,
    as_slices,
    clip,
    normalise,
    shift,
    to_dense,
)

SIZE = 6


def pictures(slices, q_len=SIZE, k_len=SIZE):
    """bool[n, q_len, k_len]: each slice's pairs by the definition of a slice."""
    q0, q1, k0, k1, lo, hi = (column[:, None, None] for column in slices.T)
    i, j = np.arange(q_len)[None, :, None], np.arange(k_len)[None, None, :]
    inside = (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1)
    return inside & (lo <= j - i) & (j - i <= hi)


def every_slice():
    """All slices with bounds in 0..SIZE and bands in -SIZE..SIZE, empty ones included."""
    spans = np.array([(a, b) for a in range(SIZE + 1) for b in range(a, SIZE + 1)])
    bands = np.array(list(itertools.product(range(-SIZE, SIZE + 1), repeat=2)))
    q, k, band = np.indices((len(spans), len(spans), len(bands))).reshape(3, -1)
    return np.concatenate([spans[q], spans[k], bands[band]], axis=1).astype(np.int64)


@pytest.fixture(scope="module")
def raw():
    return every_slice()


@pytest.fixture(scope="module")
def tight(raw):
    return normalise(raw)


@pytest.fixture(scope="module")
def sample(tight):
    """Some 200 different normalised slices."""
    distinct = np.unique(tight, axis=0)
    return distinct[:: len(distinct) // 200]


def test_normalise_keeps_every_pair_and_drops_what_is_empty(raw, tight):
    pairs = pictures(raw)
    nonempty = pairs.any(axis=(1, 2))
    assert len(raw) == 28 * 28 * 13 * 13 and 0 < nonempty.sum() < len(raw)
    assert len(tight) == nonempty.sum()
    assert (pictures(tight) == pairs[nonempty]).all()


def test_normalise_is_tight(tight):
    q0, q1, k0, k1, lo, hi = tight.T
    assert (k1 <= q1 + hi).all() and (k0 >= q0 + lo).all()
    assert (q1 <= k1 - lo).all() and (q0 >= k0 - hi).all()
    pairs = pictures(tight)
    rows, keys = pairs.any(axis=2), pairs.any(axis=1)
    assert (rows.sum(axis=1) == q1 - q0).all(), "each row has a key"
    assert (keys.sum(axis=1) == k1 - k0).all(), "each key has a row"
    assert (lo > k0 - q1).all() and (hi < k1 - q0).all(), "the band ends inside the rectangle"


def test_normalise_is_idempotent(tight):
    assert (normalise(tight) == tight).all()


def test_flash_attention_window_describes_a_normalised_slice(tight):
    """Row i of sq sees keys j of sk with i + sk - sq - left <= j <= i + sk - sq + right."""
    q0, q1, k0, k1, lo, hi = tight.T
    left, right = (k1 - q1) - lo, hi - (k1 - q1)
    assert (left >= 0).all() and (right >= 0).all(), "negative would mean unbounded"
    zero, corner = np.zeros_like(q0), (k1 - k0) - (q1 - q0)
    window = np.stack([zero, q1 - q0, zero, k1 - k0, corner - left, corner + right], axis=1)
    local = pictures(window)
    whole = pictures(tight)
    assert (local.sum(axis=(1, 2)) == whole.sum(axis=(1, 2))).all()
    n, i, j = np.nonzero(local)
    assert whole[n, i + q0[n], j + k0[n]].all()


def test_unbounded_is_a_wide_band(raw):
    wide, infinite = raw.copy(), raw.copy()
    wide[:, [LO, HI]] = -2 * SIZE, 2 * SIZE
    infinite[:, [LO, HI]] = -UNBOUNDED, UNBOUNDED
    assert (normalise(wide) == normalise(infinite)).all()


def test_areas(tight):
    assert (areas(tight) == pictures(tight).sum(axis=(1, 2))).all()


def test_area_before(sample):
    rows = np.array([3, -2, 0, 1, 9, 6, 5, 2, 4, 3])
    below = np.arange(SIZE)[None, :] < rows[:, None]
    for one, pairs in zip(sample, pictures(sample), strict=True):
        want = (below * pairs.sum(axis=1)).sum(axis=1)
        assert (area_before(one[None], rows) == want).all(), one
    want = (below * pictures(sample).sum(axis=(0, 2))).sum(axis=1)
    assert (area_before(sample, rows) == want).all()
    assert (area_before(sample[:0], rows) == 0).all()


def test_areas_of_long_sequences():
    million = 1_000_000
    causal = AttnMask.dense(million, causal=True)
    assert causal.area == million * (million + 1) // 2
    assert AttnMask.dense(million).area == million**2
    assert AttnMask.dense(million, window=(100, 7)).area == 108 * million - 100 * 101 // 2 - 28
    assert area_before(causal.slices, np.array([1000])).tolist() == [500_500]


def test_clip(sample):
    pairs = pictures(sample)
    i, j = np.arange(SIZE)[:, None], np.arange(SIZE)[None, :]
    spans = [(a, b) for a in range(-1, SIZE + 2) for b in range(a, SIZE + 2)]
    for (q0, q1), (k0, k1) in itertools.product(spans, spans):
        want = pairs & ((q0 <= i) & (i < q1) & (k0 <= j) & (j < k1))
        got = clip(sample, q0, q1, k0, k1)
        assert (pictures(got) == want[want.any(axis=(1, 2))]).all()
        assert (normalise(got) == got).all()


def test_clip_leaves_its_argument_alone(sample):
    before = sample.copy()
    clip(sample, 1, 3, 1, 3)
    assert (sample == before).all()


@pytest.mark.parametrize(("q_by", "k_by"), [(0, 0), (3, 0), (0, 4), (2, 5), (5, 1)])
def test_shift(sample, q_by, k_by):
    moved = shift(sample, q_by, k_by)
    want = np.zeros((len(sample), SIZE + q_by, SIZE + k_by), dtype=bool)
    want[:, q_by:, k_by:] = pictures(sample)
    assert (pictures(moved, SIZE + q_by, SIZE + k_by) == want).all()
    assert (shift(moved, -q_by, -k_by) == sample).all()


def test_to_dense(sample):
    for one, pairs in zip(sample, pictures(sample), strict=True):
        assert (to_dense(one[None], SIZE, SIZE) == pairs).all()
    assert (to_dense(sample[:5], SIZE, SIZE) == pictures(sample[:5]).any(axis=0)).all()
    assert to_dense(sample[:0], 2, 3).tolist() == [[False] * 3] * 2


def test_first_overlap_of_two(raw):
    some = raw[:: len(raw) // 130]  # not normalised, some of them empty
    pairs = pictures(some)
    for a, b in itertools.combinations(range(len(some)), 2):
        meet = bool((pairs[a] & pairs[b]).any())
        assert first_overlap(some[[a, b]]) == ((0, 1) if meet else None), some[[a, b]]


def test_first_overlap_of_many():
    tiles = as_slices([(a, a + 2, b, b + 2, -9, 9) for a in (0, 2, 4) for b in (0, 2, 4)])
    assert first_overlap(tiles) is None
    assert first_overlap(tiles[:0]) is None and first_overlap(tiles[:1]) is None
    again = np.concatenate([tiles, tiles[[6, 3]]])
    assert first_overlap(again) == (3, 10)


def test_from_slices():
    mask = AttnMask.from_slices(
        [(0, 3, 0, 3, -9, 0), (3, 4, 0, 0, -9, 9), (0, 2, 3, 5, 3, 9)], 4, 5
    )
    want = [[1, 0, 0, 1, 1], [1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert mask.to_dense().astype(int).tolist() == want
    assert mask.area == 9 and len(mask.slices) == 2
    empty = AttnMask.from_slices([], 2, 3)
    assert empty.area == 0 and empty.slices.shape == (0, 6) and not empty.to_dense().any()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [(0, 4, 0, 4, -9, 9), (0, 5, 0, 4, -9, 9)],
            "slice (0, 5, 0, 4, -9, 9) leaves the mask of 4 queries x 6 keys",
        ),
        ([(-1, 4, 0, 4, 0, 0)], "slice (-1, 4, 0, 4, 0, 0) leaves the mask of 4 queries x 6 keys"),
        ([(0, 4, 0, 7, 0, 0)], "slice (0, 4, 0, 7, 0, 0) leaves the mask of 4 queries x 6 keys"),
        ([(0, 4, -1, 2, 0, 0)], "slice (0, 4, -1, 2, 0, 0) leaves the mask of 4 queries x 6 keys"),
        ([(3, 2, 0, 2, 0, 0)], "slice (3, 2, 0, 2, 0, 0) leaves the mask of 4 queries x 6 keys"),
        ([(0, 2, 2, 1, 0, 0)], "slice (0, 2, 2, 1, 0, 0) leaves the mask of 4 queries x 6 keys"),
        (
            [(0, 4, 0, 4, -9, 0), (0, 1, 5, 6, 5, 5), (2, 4, 1, 6, 0, 9)],
            "slices (0, 4, 0, 4, -3, 0) and (2, 4, 2, 6, 0, 3) cover the same pairs; "
            "a mask is a disjoint list",
        ),
    ],
)
def test_from_slices_errors(rows, message):
    with pytest.raises(MaskError) as info:
        AttnMask.from_slices(rows, 4, 6)
    assert str(info.value) == message
    assert isinstance(info.value, ValueError)


def flash_attention_rule(q_len, k_len, causal, window):
    """Flash-attn's documentation: row i of q_len sees, of k_len keys,
    [i + k_len - q_len - left, i + k_len - q_len + right]; -1 is unbounded; causal: right = 0."""
    left, right = window[0], (0 if causal else window[1])
    i, j = np.arange(q_len)[:, None] + k_len - q_len, np.arange(k_len)[None, :]
    seen = np.ones((q_len, k_len), dtype=bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


@pytest.mark.parametrize("causal", [False, True])
def test_dense_is_flash_attention(causal):
    windows = list(itertools.product(range(-1, 5), repeat=2))
    for q_len, k_len in itertools.product(range(8), repeat=2):
        for window in windows:
            mask = AttnMask.dense(q_len, k_len, causal=causal, window=window)
            want = flash_attention_rule(q_len, k_len, causal, window)
            assert (mask.to_dense() == want).all(), (q_len, k_len, window)
            assert mask.area == want.sum()
            assert (normalise(mask.slices) == mask.slices).all()


def test_dense_defaults():
    assert AttnMask.dense(3) == AttnMask.dense(3, 3, causal=False, window=(-1, -1))
    assert AttnMask.dense(3).to_dense().all()


@pytest.mark.parametrize("window", [(-1, -1), (1, -1), (0, 2), (2, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0, 3, 7], None),
        ([0, 0, 3, 3, 7, 7], None),  # empty documents at both ends and inside
        ([0, 3, 3, 7], [0, 2, 6, 11]),  # keys without queries, more keys than queries
        ([0, 3, 5, 7], [0, 2, 2, 3]),  # queries without keys, more queries than keys
        ([0], None),
        ([0, 0], None),
    ],
)
def test_varlen(cu_q, cu_k, causal, window):
    mask = AttnMask.varlen(cu_q, cu_k, causal=causal, window=window)
    cu_k = cu_q if cu_k is None else cu_k
    want = np.zeros((cu_q[-1], cu_k[-1]), dtype=bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        want[q0:q1, k0:k1] = flash_attention_rule(q1 - q0, k1 - k0, causal, window)
    assert (mask.q_len, mask.k_len) == want.shape
    assert (mask.to_dense() == want).all()
    assert first_overlap(mask.slices) is None


def test_equality_and_hash_are_by_value():
    mask = AttnMask.dense(4, causal=True)
    same = AttnMask.from_slices([(0, 4, 0, 4, -99, 0)], 4, 4)
    assert mask is not same and mask == same and hash(mask) == hash(same)
    assert mask == AttnMask.varlen(np.array([0, 0, 4], dtype=np.int32), causal=True)
    others = [
        AttnMask.dense(4),
        AttnMask.dense(5, causal=True),
        AttnMask.from_slices(mask.slices, 4, 5),
        AttnMask.from_slices(mask.slices, 5, 4),
    ]
    assert all(mask != other for other in others)
    assert mask != mask.key
    assert len({mask, same, *others}) == 5


def test_a_mask_cannot_be_changed():
    mask = AttnMask.dense(4)
    with pytest.raises(ValueError, match="read-only"):
        mask.slices[0, Q1] = 2
    rows = np.array([(0, 2, 0, 2, -1, 1)], dtype=np.int64)
    kept = AttnMask.from_slices(rows, 2, 2)
    rows[0, [Q0, K0, K1]] = 1
    assert kept == AttnMask.dense(2)
