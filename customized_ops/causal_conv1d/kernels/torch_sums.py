"""In plain torch: a product and a sum for each token of the width."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ring_attention.core.merge.merge import accumulation_dtype
from ..halo import Halo
from .protocol import Filter, Request

NAME = "torch"


def missing() -> str | None:
    return None


def refuses(given: Request) -> str | None:
    return None


def unproven(given: Request) -> str | None:
    return None


def convolve(x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
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
