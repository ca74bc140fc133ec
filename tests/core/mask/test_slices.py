"""Slices of a mask: normalised, tight, clipped, shifted, counted."""

import itertools

import numpy as np
import pytest

from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import (
    HI,
    LO,
    UNBOUNDED,
    areas,
    clip,
    normalise,
    shift,
    tighten,
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


def test_tighten_keeps_every_slice(raw, tight):
    kept = tighten(raw)
    assert (pictures(kept) == pictures(raw)).all()
    assert (kept[pictures(raw).any(axis=(1, 2))] == tight).all()


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


def test_areas_of_long_sequences():
    million = 1_000_000
    assert AttnMask.dense(million, causal=True).area == million * (million + 1) // 2
    assert AttnMask.dense(million).area == million**2
    assert AttnMask.dense(million, window=(100, 7)).area == 108 * million - 100 * 101 // 2 - 28


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
