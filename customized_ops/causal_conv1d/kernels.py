"""The convolution on one device, in plain torch: a product and a sum for each token of the width.

y_t = act(bias + Σ_j weight_j x_{t - width + 1 + j})        tokens before the document are 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ring_attention.core.merge.merge import accumulation_dtype
from .halo import Halo

ACTIVATIONS = ("", "silu", "swish")  # the last two are one function


@dataclass(frozen=True)
class Filter:
    """What is convolved with.

    Attributes:
        weight: [d, width]. bias: [d] or None. activation: one of :data:`ACTIVATIONS`.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str


def convolve(x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
    """[b, n, d] -> [b, n, d] of a buffer; differentiable. Tokens of a halo give anything. In fp32
    (fp64 for fp64)."""
    wide = accumulation_dtype(x.dtype)
    position = halo.positions.on(x.device).unsqueeze(-1)
    weight, values = filter_.weight.to(wide), x.to(wide)
    y = values * weight[:, -1]
    for back in range(1, min(weight.shape[1], x.shape[1])):
        before = torch.nn.functional.pad(values[:, :-back], (0, 0, back, 0))
        y = y + before.masked_fill(position < back, 0) * weight[:, -1 - back]
    if filter_.bias is not None:
        y = y + filter_.bias.to(wide)
    return (torch.nn.functional.silu(y) if filter_.activation else y).to(x.dtype)
