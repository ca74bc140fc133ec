import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask, MaskError, overlap
from customized_ops.ring_attention.core.mask.overlap import first_overlap, require_disjoint
from customized_ops.ring_attention.core.mask.slices import as_slices, to_dense

SIZE = 8


def counted(slices):
    """The smallest pair of slices that share a cell of their pictures, by drawing each."""
    pictures = [to_dense(one[None], SIZE, SIZE) for one in slices]
    for a, b in itertools.combinations(range(len(slices)), 2):
        if (pictures[a] & pictures[b]).any():
            return a, b
    return None


@st.composite
def any_slices(draw, most=12):
    """Small slices, some empty, some with a band that says nothing; shared pairs are likely."""
    bound, band = st.integers(0, SIZE), st.integers(-SIZE, SIZE)
    row = st.tuples(bound, bound, bound, bound, band, band)
    return as_slices(draw(st.lists(row, max_size=most)))


def disjoint(draw_dense):
    """The set cells of a bool matrix as slices of one pair each."""
    return as_slices([(i, i + 1, j, j + 1, -99, 99) for i, j in np.argwhere(draw_dense)])


@given(any_slices())
@settings(deadline=None, derandomize=True, max_examples=250)
def test_first_overlap_is_the_first_of_drawn_slices(slices):
    assert first_overlap(slices) == counted(slices)


@given(st.integers(0, 2**16 - 1), any_slices(most=1), st.randoms(use_true_random=False))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_one_slice_among_disjoint_ones(cells, one, random):
    """Mostly disjoint lists, in which random slices seldom are."""
    bits = np.array([cells >> n & 1 for n in range(16)], dtype=bool).reshape(4, 4)
    rows = [*disjoint(bits).tolist(), *one.tolist()]
    random.shuffle(rows)
    slices = as_slices(rows)
    assert first_overlap(slices) == counted(slices)


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunks_of_candidates(chunk, monkeypatch):
    tiles = as_slices([(a, a + 2, b, b + 2, -9, 9) for a in (0, 2, 4) for b in (0, 2, 4)])
    again = np.concatenate([tiles, tiles[[6, 3]]])
    monkeypatch.setattr(overlap, "CHUNK", chunk)
    assert first_overlap(tiles) is None
    assert first_overlap(again) == counted(again) == (3, 10)


def test_none_and_one():
    tile = as_slices([(0, 2, 0, 2, -9, 9)])
    assert first_overlap(tile[:0]) is None
    assert first_overlap(tile) is None
    assert first_overlap(np.concatenate([tile, tile])) == (0, 1)


@pytest.mark.parametrize(
    ("mask", "candidates"),
    [
        (AttnMask.varlen(np.arange(4097) * 16, causal=True), 0),  # touch, never meet
        (AttnMask.strided(8192, 2, 0), 0),  # meet in queries and keys, not along the diagonals
        # Along the queries the first column meets each of the blocks below the first row.
        (AttnMask.global_local(4096 * 16, 1, 1, block=16), 4095),
        # 90 block rows of 45 runs each
        (
            AttnMask.from_block_mask(np.indices((90, 90)).sum(axis=0) % 2 == 0, 64),
            90 * 45 * 44 // 2,
        ),
    ],
    ids=["documents", "bands", "column", "blocks"],
)
def test_thousands_of_slices_have_few_candidates(mask, candidates, monkeypatch):
    """Of some 8 million pairs."""
    tested = []
    share_a_pair = overlap._share_a_pair
    monkeypatch.setattr(
        overlap, "_share_a_pair", lambda a, b: tested.append(len(a)) or share_a_pair(a, b)
    )
    assert len(mask.slices) >= 4050
    assert first_overlap(mask.slices) is None
    assert sum(tested) == candidates
    twice = np.concatenate([mask.slices, mask.slices[-1:]])
    assert first_overlap(twice) == (len(mask.slices) - 1, len(mask.slices))


def test_the_error_names_both_slices():
    rows = as_slices([(0, 2, 0, 2, -1, 1), (5, 6, 5, 6, 0, 0), (1, 3, 1, 3, -1, 1)])
    require_disjoint(rows[:2], str)
    with pytest.raises(MaskError) as info:
        require_disjoint(rows, lambda n: f"the slice {n}")
    assert str(info.value) == (
        "the slice 0 and the slice 2 cover the same pairs; a mask is a disjoint list"
    )


@given(any_slices())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_slices_are_named_as_given(slices):
    """Empty ones count, and bounds need not be tight."""
    twice = counted(slices)
    if twice is None:
        require_disjoint(slices, str)
    else:
        with pytest.raises(MaskError, match=f"^{twice[0]} and {twice[1]} cover"):
            require_disjoint(slices, str)
