"""Masks as values: what they are made of, how they compare, print and are copied."""

import copy
import itertools
import pickle

import numpy as np
import pytest

from customized_ops.ring_attention.core.mask import AttnMask, MaskError
from customized_ops.ring_attention.core.mask.overlap import first_overlap
from customized_ops.ring_attention.core.mask.slices import K0, K1, Q0, Q1, normalise

MOST = 2**63 - 1


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
