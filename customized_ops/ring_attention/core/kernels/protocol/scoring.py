"""How scores become probabilities, and the global indices that this depends on.

    score_ij = cap(scale q_i.k_j) - slope |i - j|       cap(x) = softcap tanh(x / softcap), or x
    p_ij     = exp(score_ij - lse_i)                    lse_i over all scores of row i
    out_i    = sum_j p_ij keep_ij / (1 - dropout_p) v_j

Dropout does not change lse, so parts of a row's keys merge with dropout as they do without. What it
keeps is a pure function of a seed and of global indices: words of :mod:`annotations.philox`, where

| | word 0 | word 1 | word 2 | word 3 |
|---|---|---|---|---|
| counter | query index | key index | head // 4 | batch index |
| key | seed, low half | seed, high half | | |
| result | head % 4 = 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from annotations.philox import LOW, WORDS, philox, threshold


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a call does to its scores besides the mask. Tensors are on q's device unless noted.

    Attributes:
        softmax_scale: what q.k is multiplied by.
        softcap: scores are kept within (-softcap, softcap) by a tanh; 0 is no cap.
        alibi_slopes: fp32 [b or 1, h], of the heads of q: what a score loses per token of
            distance, after the cap (Press et al., arXiv:2108.12409, 2021). Takes no gradient.
        dropout_p: the fraction of probabilities that become 0, in [0, 1).
        dropout_seed: int64[1], needed where dropout_p > 0; on any device, but a seed on the host
            costs each call a copy if q is on a GPU.
    """

    softmax_scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.softcap >= 0, f"softcap {self.softcap} is negative"
        assert 0 <= self.dropout_p < 1, f"dropout_p {self.dropout_p} is not in [0, 1)"
        assert not self.dropout_p or self.dropout_seed is not None, "dropout needs a seed"

    @property
    def features(self) -> tuple[str, ...]:
        """Those of ``request.FEATURES`` that a kernel needs for this."""
        asked = {
            "softcap": self.softcap > 0,
            "alibi": self.alibi_slopes is not None,
            "dropout": self.dropout_p > 0,
            "scale of 0 or less": self.softmax_scale <= 0,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    @cached_property  # looked at before every call of a kernel
    def needs_tokens(self) -> bool:
        """Whether a kernel needs :class:`Tokens`."""
        return self.alibi_slopes is not None or self.dropout_p > 0

    def alibi_bias(self, tokens: Tokens, dtype: torch.dtype) -> Tensor:
        """What ALiBi adds to the scores, [b or 1, h, i, j] in ``dtype``."""
        assert self.alibi_slopes is not None
        return -self.alibi_slopes.to(dtype)[..., None, None] * tokens.distances().to(dtype)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Which rows, keys, heads and batch entries of the whole attention a kernel call has. On q's
    device.

    Attributes:
        rows: int64[i], the global query index of each row of q.
        keys: int64[j], the global key index of each row of k.
        key_positions: int64[j], each key's position among the queries; differs from ``keys`` where
            the two sequences differ in length.
        first_head: global index of the first head of q.
        first_batch: global index of the first batch entry.
    """

    rows: Tensor
    keys: Tensor
    key_positions: Tensor
    first_head: int
    first_batch: int = 0

    def part(self, rows: slice, keys: slice) -> Tokens:
        """The tokens of some of the rows and keys."""
        return replace(
            self, rows=self.rows[rows], keys=self.keys[keys], key_positions=self.key_positions[keys]
        )

    def distances(self) -> Tensor:
        """int64[i, j], tokens between each row and each key."""
        return (self.rows[:, None] - self.key_positions[None, :]).abs()


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
        bool[batch, heads, i, j] on the device of ``rows``, for the heads from ``first_head`` on and
        the batch entries from ``first_batch`` on.
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
