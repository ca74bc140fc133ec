"""Slices from dense masks: the same pairs, and few slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention import AttnMask

FEW_EXAMPLES = settings(max_examples=60, deadline=None)
FEW = {
    "causal": (AttnMask.causal(30), 1),
    "longer keys": (AttnMask.causal(7, 20), 1),
    "window": (AttnMask.sliding_window(30, 4, 3), 1),
    "documents": (AttnMask.varlen([0, 9, 20, 30], causal=True), 3),
    "streaming": (AttnMask.streaming(30, window=4, sink=2), 3),
    "prefix": (AttnMask.prefix_lm(30, 8), 2),
    "blocks": (AttnMask.block_causal(32, 8), 4),
    "inverse": (AttnMask.from_ranges([(2, 12)], [(3, 9)], ["inv_causal"], 14, 11), 1),
    "nothing": (AttnMask.from_slices([], 3, 4), 0),
}


@pytest.mark.parametrize("name", FEW)
def test_few_slices(name: str) -> None:
    mask, most = FEW[name]
    again = AttnMask.from_dense(mask.to_dense())
    assert np.array_equal(again.to_dense(), mask.to_dense())
    assert len(again.slices) <= most


@FEW_EXAMPLES
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.integers(0, 10**6))
def test_any_matrix(rows: int, keys: int, density: float, seed: int) -> None:
    dense = np.random.default_rng(seed).random((rows, keys)) < density
    mask = AttnMask.from_dense(dense)
    assert np.array_equal(mask.to_dense(), dense)
    AttnMask(mask.slices, rows, keys)  # disjoint, or it raises


@FEW_EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14))
def test_any_staircase(rows: list[tuple[int, int]]) -> None:
    """A run in each row, whose ends go anywhere: where most chains turn."""
    dense = np.zeros((len(rows), 10), dtype=bool)
    for n, (a, b) in enumerate(rows):
        dense[n, min(a, b) : max(a, b)] = True
    assert np.array_equal(AttnMask.from_dense(dense).to_dense(), dense)
