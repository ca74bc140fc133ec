"""Attention dropout's random numbers: a pure function of a seed and of global indices.

They are words of :mod:`annotations.philox`:

| | word 0 | word 1 | word 2 | word 3 |
|---|---|---|---|---|
| counter | query index | key index | head // 4 | batch index |
| key | seed, low half | seed, high half | | |
| result | head % 4 = 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

import torch
from torch import Tensor

from annotations.philox import LOW, WORDS, philox, threshold


def keep(
    seed: Tensor,
    p: float,
    rows: Tensor,
    keys: Tensor,
    first_head: int,
    heads: int,
    first_batch: int,
    batch: int,
) -> Tensor:
    """Dropout's mask: True, with probability 1 - p, where a probability is kept.

    Args:
        seed: int64[1], any device.
        rows: int64[i] global query indices, keys: int64[j] global key indices, below 2^32.
    Returns:
        bool[batch, heads, i, j] on the device of ``rows``: of the heads from ``first_head`` and the
        batch entries from ``first_batch`` on.
    """
    device = rows.device
    groups = torch.arange(first_head // WORDS, -(-(first_head + heads) // WORDS), device=device)
    entries = torch.arange(first_batch, first_batch + batch, device=device)
    seed = seed.to(device)
    words = philox(
        (rows[:, None], keys[None, :], groups[:, None, None], entries[:, None, None, None]),
        (seed & LOW, (seed >> 32) & LOW),
    )
    by_head = torch.stack([word >= threshold(p) for word in words], dim=2).flatten(1, 2)
    return by_head[:, first_head % WORDS :][:, :heads]
