"""Merging partial attention results.

Attention over keys A and B is exact from its parts (Milakov & Gimelshein, arXiv:1805.02867, 2018):

    lse = log(exp(lse_A) + exp(lse_B))
    out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

Everything here is fp32, or fp64 beside fp64 inputs: rounding between stages would grow with them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into ``(out, lse)``, in place.

    A row that neither side attends keeps out 0 and lse -inf.

    Args:
        out: [b, l, h, d], accumulation dtype. lse: [b, h, l], natural log.
        part_out: [b, l, h, d], any dtype. part_lse: [b, h, l].
    """
    top = torch.maximum(lse, part_lse)
    top = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weight, part_weight = torch.exp(lse - top), torch.exp(part_lse - top)
    total = weight + part_weight
    norm = total.clamp_min(torch.finfo(total.dtype).tiny)
    out.mul_(_per_row(weight / norm)).add_(part_out * _per_row(part_weight / norm))
    lse.copy_(top + torch.log(total))


def _per_row(x: Tensor) -> Tensor:
    """[b, h, l] -> [b, l, h, 1]."""
    return x.transpose(1, 2).unsqueeze(-1)


class Accumulator:
    """The running result of one block of rows over stages.

    The first part is kept as it is; only a second one costs a merge.
    """

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._merging = False

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the result of attending further keys; takes ownership of both tensors."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        if not self._merging:
            self._out = self._out.to(accumulation_dtype(self._out.dtype))
            self._merging = True
        merge_(self._out, self._lse, out, lse)

    def result(self, rows: Tensor, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in ``dtype``, lse). ``rows``: the block of q, [b, l, h, d]."""
        if self._out is None or self._lse is None:
            return unattended(rows, v_dim, dtype)
        return self._out.to(dtype), self._lse


def unattended(rows: Tensor, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Result of rows that attend nothing: out 0, lse -inf. ``rows``: [b, l, h, d]."""
    b, length, h, _ = rows.shape
    lse = rows.new_full((b, h, length), -torch.inf, dtype=accumulation_dtype(rows.dtype))
    return rows.new_zeros((b, length, h, v_dim), dtype=dtype), lse


class Sum:
    """The running gradient of one tensor over stages and ranks.

    The first part is kept as it is; from the second on the sum is in the accumulation dtype.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a part, shaped as the whole, in any dtype; takes ownership of it."""
        if self._total is None:
            self._total = part
        else:
            self.wide().add_(part)

    def wide(self) -> Tensor:
        """The sum so far in the accumulation dtype, to be added to in place."""
        dtype = accumulation_dtype(self._like.dtype)
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=dtype)
        self._total = self._total.to(dtype)
        return self._total

    def so_far(self) -> Tensor:
        """The sum so far in the dtype that it has: a single part in its own."""
        return torch.zeros_like(self._like) if self._total is None else self._total

    def result(self) -> Tensor:
        """The sum in its own tensor's dtype."""
        return self.so_far().to(self._like.dtype)
