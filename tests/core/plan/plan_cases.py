"""Masks and layouts to plan, and what plans of them do."""

import numpy as np
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import as_slices, normalise, to_dense
from customized_ops.ring_attention.core.plan import Plan
from customized_ops.ring_attention.core.plan.moves import (
    RECV,
    SEND,
    SEND_OFFSET,
    TOKEN0,
    TOKEN1,
    located,
)


def moves_of(plan: Plan, side: str = "kv") -> np.ndarray:
    """Who sends what to whom, a rank's own included."""
    needed, layout = (
        (plan.q_needed, plan.q_layout) if side == "q" else (plan.kv_needed, plan.k_layout)
    )
    return located(needed, layout.pieces)


def moved(moves: np.ndarray, layout: Layout, team: int) -> list[int]:
    """Tokens that ``team`` is said to need, each from where it is."""
    tokens = []
    for move in moves[moves[:, RECV] == team].tolist():
        span = range(move[TOKEN0], move[TOKEN1])
        held = layout.positions(move[SEND])[move[SEND_OFFSET] :][: len(span)]
        assert held.tolist() == list(span) and len(span) > 0
        tokens += span
    return tokens


def painted(slices: np.ndarray, rows: int, keys: int) -> np.ndarray:
    """int[rows, keys]: how many slices attend each pair."""
    count = np.zeros((rows, keys), dtype=int)
    for one in slices:
        count += to_dense(one[None], rows, keys)
    return count


@st.composite
def disjoint_slices(draw, q_len: int, k_len: int, bands: st.SearchStrategy) -> AttnMask:
    """Any slices with ``bands`` (lo, hi), less those that meet one before them."""
    taken, rows = np.zeros((q_len, k_len), dtype=bool), []
    for _ in range(draw(st.integers(0, 6))):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, q_len), st.integers(0, q_len))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, k_len), st.integers(0, k_len))))
        one = normalise(as_slices([(q0, q1, k0, k1, *draw(bands))]))
        pairs = to_dense(one, q_len, k_len)
        if len(one) and not (pairs & taken).any():
            taken |= pairs
            rows.append(one[0].tolist())
    return AttnMask.from_slices(rows, q_len, k_len)


@st.composite
def layouts(draw, total: int, ranks: int) -> Layout:
    kind = draw(st.sampled_from(["contiguous", "zigzag", "sizes"]))
    if kind != "sizes":
        return getattr(Layout, kind)(total, ranks)
    cuts = draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))
    return Layout.from_sizes(np.diff([0, *sorted(cuts), total]).tolist())
