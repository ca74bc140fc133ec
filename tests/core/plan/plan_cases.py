"""Masks and layouts to plan, and what plans of them do."""

import numpy as np

from customized_ops.ring_attention.core.layout import Layout
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
