"""Tensors of a layout, on ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from customized_ops.ring_attention import Layout, run_ranks
from customized_ops.ring_attention.core.comm import Comm


def whole(layout: Layout, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[2, 3, 4] with ``dim`` as long as the layout, every element another."""
    shape = [2, 3, 4]
    shape[dim] = layout.total
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def on_ranks(layout: Layout, function: Callable[[Comm], Tensor]) -> list[Tensor]:
    return run_ranks(layout.group_size, function)
