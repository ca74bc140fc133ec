"""What a mask can do: its picture, parts, unions and shifts, and what it refuses."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask, MaskError
from customized_ops.ring_attention.core.mask.slices import normalise


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
