"""Any disjoint slices, as hypothesis draws them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from customized_ops.ring_attention.core.mask.slices import Slices, as_slices, normalise

UNBOUNDED = 1 << 30


@st.composite
def grids_of_bands(draw: Any, most_rows: int, most_keys: int) -> tuple[Slices, int, int]:
    """Slices, rows, keys: the rectangle cut into cells, and in each nothing, all, or a band. Cells
    are disjoint, and neighbours may be all, so unions of several slices occur."""
    rows, keys = draw(st.integers(1, most_rows)), draw(st.integers(1, most_keys))
    q_cuts, k_cuts = draw(_cuts(rows)), draw(_cuts(keys))
    found = []
    for q0, q1 in pairwise(q_cuts):
        for k0, k1 in pairwise(k_cuts):
            diagonal = st.integers(k0 - q1 - 2, k1 - q0 + 2)
            lo = draw(st.one_of(st.just(-UNBOUNDED), diagonal))
            hi = draw(st.one_of(st.just(UNBOUNDED), diagonal))
            if draw(st.integers(0, 3)):
                found.append((q0, q1, k0, k1, lo, hi))
    return normalise(as_slices(found)), rows, keys


@st.composite
def _cuts(draw: Any, length: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), max_size=3))
    return np.unique([0, *inner, length]).tolist()
