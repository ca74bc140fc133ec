"""Documents of several batches."""

from __future__ import annotations

import numpy as np

HEADS = (4, 2)


def documents(seed: int) -> list[list[int]]:
    """Some of no token, of one, and a long one."""
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(0, 12, draw.integers(1, 9)).tolist(), 1, int(draw.integers(20, 60))]
    return [draw.integers(1, 99, n).tolist() for n in draw.permutation(lengths)]


BATCHES = [documents(seed) for seed in range(12)]
