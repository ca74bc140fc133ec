import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask, MaskError
from customized_ops.ring_attention.core.mask.overlap import first_overlap
from customized_ops.ring_attention.core.mask.slices import (
    HI,
    K0,
    K1,
    LO,
    Q0,
    Q1,
    UNBOUNDED,
    areas,
    clip,
    normalise,
    shift,
    tighten,
    to_dense,
)

SIZE = 6
MOST = 2**63 - 1


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
            "slices[1] = (0, 5, 0, 4, -9, 9) leaves the mask of 4 queries x 6 keys",
        ),
        (
            [(-1, 4, 0, 4, 0, 0)],
            "slices[0] = (-1, 4, 0, 4, 0, 0) leaves the mask of 4 queries x 6 keys",
        ),
        (
            [(0, 4, 0, 7, 0, 0)],
            "slices[0] = (0, 4, 0, 7, 0, 0) leaves the mask of 4 queries x 6 keys",
        ),
        (
            [(0, 4, -1, 2, 0, 0)],
            "slices[0] = (0, 4, -1, 2, 0, 0) leaves the mask of 4 queries x 6 keys",
        ),
        (
            [(3, 2, 0, 2, 0, 0)],
            "slices[0] = (3, 2, 0, 2, 0, 0) leaves the mask of 4 queries x 6 keys",
        ),
        (
            [(0, 2, 2, 1, 0, 0)],
            "slices[0] = (0, 2, 2, 1, 0, 0) leaves the mask of 4 queries x 6 keys",
        ),
        (
            [(0, 4, 0, 4, -9, 0), (0, 1, 5, 6, 5, 5), (2, 4, 1, 6, 0, 9)],
            "slices[0] = (0, 4, 0, 4, -9, 0) and slices[2] = (2, 4, 1, 6, 0, 9) cover the same "
            "pairs; a mask is a disjoint list",
        ),
        (  # empty slices are dropped, but counted
            [(1, 1, 0, 4, 0, 0), (0, 4, 0, 6, -MOST, MOST), (0, 4, 0, 4, 2, 1), (3, 4, 5, 6, 0, 9)],
            f"slices[1] = (0, 4, 0, 6, -{MOST}, {MOST}) and slices[3] = (3, 4, 5, 6, 0, 9) cover "
            "the same pairs; a mask is a disjoint list",
        ),
        (
            [(0, 1, 0, 1, 0, 0)] * 200 + [(0, 1, 0, 1, 0, 0.5)],
            "slices[200] must be 6 integers of 64 bits, got (0, 1, 0, 1, 0, 0.5)",
        ),
        (
            [(0, 1, 0, 1, 0, 0), (0, True, 0, 1, 0, 0)],
            "slices[1] must be 6 integers of 64 bits, got (0, True, 0, 1, 0, 0)",
        ),
        (
            [(0, 1, 0, 1, 0, 0), (0, 1, 0, 1, np.False_, 0)],
            "slices[1] must be 6 integers of 64 bits, got (0, 1, 0, 1, np.False_, 0)",
        ),
        ([(0, 1, 0, 1, 0, 0), 3], "slices[1] must be 6 integers of 64 bits, got 3"),
        (
            [(0, 1, 0, 1, 0, 1 << 63)],
            "slices[0] must be 6 integers of 64 bits, got (0, 1, 0, 1, 0, 9223372036854775808)",
        ),
        (
            np.zeros((200, 6), dtype=np.float32),
            "slices must be rows of 6 integers, got float32 of shape (200, 6)",
        ),
        (
            np.zeros((2, 6), dtype=bool),
            "slices must be rows of 6 integers, got bool of shape (2, 6)",
        ),
    ],
)
@pytest.mark.parametrize("make", [AttnMask, AttnMask.from_slices])
def test_from_slices_errors(make, rows, message):
    with pytest.raises(MaskError) as info:
        make(rows, 4, 6)
    assert str(info.value) == message
    assert isinstance(info.value, ValueError)


def test_unsigned_bounds_beyond_int64_do_not_wrap():
    rows = np.array([(0, 4, 0, 4, 0, 2**64 - 1)], dtype=np.uint64)
    assert AttnMask.from_slices(rows, 4, 4) == AttnMask.from_slices([(0, 4, 0, 4, 0, 3)], 4, 4)
    rows[0, Q1] = 2**64 - 1
    with pytest.raises(MaskError, match="leaves the mask"):
        AttnMask.from_slices(rows, 4, 4)


@pytest.mark.parametrize("rows", [[(0, 8, 0, 8, -7, 7)] * 2, AttnMask.full(8).slices[[0, 0]]])
def test_the_constructor_refuses_a_pair_covered_twice(rows):
    with pytest.raises(MaskError, match="cover the same pairs"):
        AttnMask(rows, 8, 8)


def test_the_constructor_normalises_and_checks_lengths():
    mask = AttnMask([(0, 4, 0, 4, -99, 0), (2, 2, 0, 4, 0, 0)], np.int64(4), 4)
    assert mask == AttnMask.causal(4) and type(mask.q_len) is int
    with pytest.raises(MaskError, match="k_len must be at least 0, got -1"):
        AttnMask([], 4, -1)


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


@pytest.mark.covering(1)
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
    with pytest.raises(AttributeError):
        mask.q_len = 5


@pytest.mark.parametrize(
    "mask",
    [
        AttnMask([(0, 8, 0, 8, -7, 7)], 8, 8),
        AttnMask.causal(8),
        AttnMask.causal(8).shift(0, 0),
        AttnMask.causal(8).restrict((1, 3)),
        AttnMask.causal(4).union(),
        AttnMask.from_ranges([(0, 2)], [(0, 2)], ["full"]),
        AttnMask.from_block_mask([[True]], 2),
        pickle.loads(pickle.dumps(AttnMask.causal(8))),
        copy.deepcopy(AttnMask.causal(8)),
    ],
)
def test_the_slices_cannot_be_made_writable(mask):
    for array in (mask.slices, mask.slices[:], mask.slices.view()):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)


@pytest.mark.parametrize("part", [np.s_[:], np.s_[...]])
def test_the_constructor_copies(part):
    """Through a view, too: what its owner does later does not reach the mask or its key."""
    base = np.array([(0, 8, 0, 8, -7, 7)], dtype=np.int64)
    mask = AttnMask(base[part], 8, 8)
    base[0, Q1] = 4
    assert mask == AttnMask.full(8) and mask.area == 64
    assert mask.key == (8, 8, mask.slices.tobytes())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_are_equal_and_read_only(copied):
    mask = AttnMask.streaming(9, 2, 1)
    other = copied(mask)
    assert type(other) is AttnMask and other == mask and hash(other) == hash(mask)
    assert len(pickle.dumps(mask)) < mask.slices.nbytes + 250, "the slices once"
    with pytest.raises(ValueError, match="read-only"):
        other.slices[0, Q1] = 2


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            AttnMask.causal(4),
            "AttnMask(q_len=4, k_len=4, slices=1, area=10, density=62.500%)",
        ),
        (
            AttnMask.sliding_window(100_000, 63, 0),
            "AttnMask(q_len=100000, k_len=100000, slices=1, area=6397984, density=0.064%)",
        ),
        (AttnMask.full(0, 3), "AttnMask(q_len=0, k_len=3, slices=0, area=0, density=0.000%)"),
    ],
)
def test_repr(mask, text):
    assert repr(mask) == text


@st.composite
def small_masks(draw):
    """Any mask of up to 9 x 9, from its cells."""
    q_len, k_len = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    bits = draw(st.integers(0, 2 ** (q_len * k_len) - 1))
    cells = np.array([bits >> n & 1 for n in range(q_len * k_len)], dtype=bool)
    if draw(st.booleans()):
        return AttnMask.dense(q_len, k_len, causal=True, window=(draw(st.integers(-1, 4)), 0))
    return AttnMask.from_block_mask(cells.reshape(q_len, k_len), 1)


@given(small_masks(), st.integers(1, 12))
@settings(deadline=None, derandomize=True)
def test_picture(mask, width):
    dense = mask.to_dense()
    tokens = max(1, -(-max(dense.shape) // width))
    lines = []
    for q0 in range(0, mask.q_len, tokens):
        cells = [dense[q0 : q0 + tokens, k0 : k0 + tokens] for k0 in range(0, mask.k_len, tokens)]
        lines.append(" ".join("x" if c.all() else "+" if c.any() else "." for c in cells))
    assert mask.picture(width) == "\n".join(lines)
    assert len(lines) <= width and all(len(line) <= 2 * width for line in lines)


def test_picture_of_long_sequences():
    picture = AttnMask.causal(1 << 20).picture().splitlines()
    assert len(picture) == 32
    assert picture[:2] == ["+" + " ." * 31, "x +" + " ." * 30]


@given(small_masks(), st.data())
@settings(deadline=None, derandomize=True)
def test_restrict_and_union(mask, data):
    """A mask cut in four is the union of its parts."""
    row, column = data.draw(st.integers(0, mask.q_len)), data.draw(st.integers(0, mask.k_len))
    spans = itertools.product([(0, row), (row, mask.q_len)], [(0, column), (column, mask.k_len)])
    parts = []
    for q_range, k_range in spans:
        part = mask.restrict(q_range, k_range)
        want = np.zeros_like(mask.to_dense())
        cut = np.s_[slice(*q_range), slice(*k_range)]
        want[cut] = mask.to_dense()[cut]
        assert (part.to_dense() == want).all()
        assert (normalise(part.slices) == part.slices).all()
        parts.append(part)
    whole = parts[0].union(*parts[1:])
    assert (whole.to_dense() == mask.to_dense()).all() and whole.area == mask.area
    assert type(whole) is type(parts[0]) is AttnMask


def test_restrict_and_union_of_everything():
    mask = AttnMask.causal(5)
    assert mask.restrict() == mask == mask.union()
    assert mask.restrict(q_range=(1, 3)) == mask.restrict((1, 3), (0, 5))


@given(small_masks(), st.tuples(*[st.integers(0, 4)] * 4))
@settings(deadline=None, derandomize=True)
def test_shift_into_a_longer_sequence_and_back(mask, margins):
    top, bottom, left, right = margins
    lengths = {"q_len": mask.q_len + top + bottom, "k_len": mask.k_len + left + right}
    moved = mask.shift(top, left, **lengths)
    assert (moved.to_dense() == np.pad(mask.to_dense(), ((top, bottom), (left, right)))).all()
    assert (normalise(moved.slices) == moved.slices).all()
    assert moved.shift(-top, -left, q_len=mask.q_len, k_len=mask.k_len) == mask


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.shift(1, 0),
            "slices[0] = (1, 5, 0, 4, -4, -1) leaves the mask of 4 queries x 4 keys",
        ),
        (
            lambda m: m.shift(0, -1),
            "slices[0] = (0, 4, -1, 3, -4, -1) leaves the mask of 4 queries",
        ),
        (
            lambda m: m.shift(0, 0, k_len=3),
            "slices[0] = (0, 4, 0, 4, -3, 0) leaves the mask of 4 queries",
        ),
        (lambda m: m.shift(1.0, 0), "q_by must be an integer, got 1.0"),
        (lambda m: m.shift(0, -5), "k_by must be at least -4, got -5"),
        (lambda m: m.shift(0, 0, q_len=-1), "q_len must be at least 0, got -1"),
        (
            lambda m: m.restrict((0, 5)),
            "q_range must be (start, stop) with start <= stop <= 4, got (0",
        ),
        (
            lambda m: m.restrict(None, (3, 2)),
            "k_range must be (start, stop) with start <= stop <= 4",
        ),
        (lambda m: m.restrict(2), "q_range must be (start, stop) or None, got 2"),
        (lambda m: m.restrict((0, 1.5)), "q_range[1] must be an integer, got 1.5"),
        (
            lambda m: m.union(AttnMask.full(4, 5)),
            "others[0] has 4 queries x 5 keys and this mask 4 x 4",
        ),
        (lambda m: m.union(m, 3), "others[1] must be a mask, got 3"),
        (
            lambda m: m.union(AttnMask.from_slices([(3, 4, 2, 4, -9, 9)], 4, 4)),
            "slice (0, 4, 0, 4, -3, 0) of this mask and slice (3, 4, 2, 4, -1, 0) of others[0] "
            "cover the same pairs",
        ),
        (
            lambda m: m.restrict((0, 2)).union(m.restrict((3, 4)), m.restrict((2, 4))),
            "slice (3, 4, 0, 4, -3, 0) of others[0] and slice (2, 4, 0, 4, -3, 0) of others[1] "
            "cover",
        ),
        (lambda m: m.picture(0), "width must be at least 1, got 0"),
        (lambda m: m.picture(4.0), "width must be an integer, got 4.0"),
    ],
)
def test_errors_of_what_a_mask_can_do(change, message):
    with pytest.raises(MaskError) as info:
        change(AttnMask.causal(4))
    assert message in str(info.value)
