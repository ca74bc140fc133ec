"""Masks made of ranges and of blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask import AttnMask

from .pattern_cases import FEW, check, ij


def range_rule(kind, q_len, k_len):
    """MagiAttention's types in a rectangle, from its corners."""
    i, j = ij(q_len, k_len)
    upper = j <= i + k_len - q_len  # ends bottom right
    lower = j >= i  # starts top left
    return {
        "full": j >= 0,
        "causal": upper,
        "inv_causal": lower,
        "bi_causal": upper & lower,
    }[kind]


@pytest.mark.parametrize(
    "number, kind", list(enumerate(["full", "causal", "inv_causal", "bi_causal"]))
)
def test_from_ranges_in_every_small_rectangle(number, kind):
    for q_len, k_len, q0, k0 in np.ndindex(6, 6, 3, 3):
        want = np.zeros((q0 + q_len, k0 + k_len), dtype=bool)
        want[q0:, k0:] = range_rule(kind, q_len, k_len)
        q, k = [(q0, q0 + q_len)], [(k0, k0 + k_len)]
        check(AttnMask.from_ranges(q, k, [kind]), want)
        wider = AttnMask.from_ranges(np.array(q), np.array(k), np.array([number]), 9, 10)
        check(wider, np.pad(want, ((0, 9 - len(want)), (0, 10 - want.shape[1]))))


def test_bi_causal_is_the_diagonal_of_a_square_and_nothing_when_tall():
    square = AttnMask.from_ranges([(0, 3)], [(1, 4)], ["bi_causal"]).to_dense()
    assert (square == np.eye(3, 4, k=1, dtype=bool)).all()
    tall = AttnMask.from_ranges([(0, 4)], [(0, 3)], ["bi_causal"])
    assert tall.area == 0 and (tall.q_len, tall.k_len) == (4, 3)


def test_from_ranges_may_meet_in_queries_and_keys():
    mask = AttnMask.from_ranges([(0, 4), (0, 4)], [(0, 2), (2, 4)], ["full", "causal"])
    i, j = ij(4)
    check(mask, (j < 2) | (j <= i))
    corners = AttnMask.from_ranges([(0, 4), (0, 3)], [(0, 4), (1, 4)], [1, 2])  # touch, share none
    check(corners, ij(4)[0] >= 0)
    assert AttnMask.from_ranges([], [], []) == AttnMask.full(0)


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
@FEW
def test_from_block_mask(data, q_block, k_block):
    rows, columns = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
    bits = data.draw(st.integers(0, 2 ** (rows * columns) - 1))
    blocks = np.array([bits >> n & 1 for n in range(rows * columns)], dtype=bool)
    blocks = blocks.reshape(rows, columns)
    q_len, k_len = rows * q_block, columns * k_block
    q_len -= data.draw(st.integers(0, q_block - 1)) if rows else 0
    k_len -= data.draw(st.integers(0, k_block - 1)) if columns else 0
    want = np.kron(blocks, np.ones((q_block, k_block), dtype=bool))
    mask = AttnMask.from_block_mask(blocks, (q_block, k_block))
    check(mask, want)
    short = AttnMask.from_block_mask(blocks, (q_block, k_block), q_len=q_len, k_len=k_len)
    check(short, want[:q_len, :k_len])
    assert (np.lexsort(mask.slices[:, [2, 0]].T) == np.arange(len(mask.slices))).all()


@pytest.mark.parametrize(
    "rows, slices",
    [
        ("111 111", 1),  # repeated rows are one slice
        ("101 101", 2),
        ("110 100", 2),  # runs that differ do not join
        ("110 110 000 110", 2),  # a gap ends a slice
        ("010 111 010", 3),
    ],
)
def test_from_block_mask_joins_equal_runs(rows, slices):
    blocks = np.array([[sign == "1" for sign in row] for row in rows.split()])
    mask = AttnMask.from_block_mask(blocks, 4)
    check(mask, np.kron(blocks, np.ones((4, 4), dtype=bool)))
    assert len(mask.slices) == slices
