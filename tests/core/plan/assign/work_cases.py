"""Masks and layouts drawn at random, and what an assignment of them must be."""

import numpy as np
from hypothesis import settings

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask

many = settings(max_examples=75, deadline=None, derandomize=True)


def row_team(layout: Layout, team_size: int) -> np.ndarray:
    """int[total]: the team that holds each token."""
    team = np.zeros(layout.total, dtype=int)
    for rank in range(layout.group_size):
        team[layout.positions(rank)] = rank // team_size
    return team


def global_and_local(tokens: int, at: int, globals_: int = 64, window: int = 512) -> AttnMask:
    """Tokens from ``at`` on attend everything and everything attends them, beside a window."""
    end = at + globals_
    rows = [
        (at, end, 0, tokens, -tokens, tokens),
        (0, at, at, end, -tokens, tokens),
        (end, tokens, at, end, -tokens, tokens),
        (0, at, 0, at, -window, 0),
        (end, tokens, end, tokens, -window, 0),
    ]
    if at:  # the window goes on over the global tokens
        rows.append((end, tokens, 0, at, -window, 0))
    return AttnMask.from_slices(rows, tokens, tokens)
