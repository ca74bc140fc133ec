"""Peers' own packages, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@cache
def not_installed(device: torch.device, package: str, module: str) -> str | None:
    """Why a package's module does not run here, or None."""
    if device.type != "cuda":
        return "needs a GPU"
    try:
        import_module(module)
    except Exception as error:  # broken installs and incompatible versions raise anything
        return f"{package} is not installed ({type(error).__name__})"
    return None


def missing(module: str, device: torch.device) -> str | None:
    """Why a package does not run here."""
    if device.type != "cuda":
        return "needs a GPU"
    try:
        import_module(module)
    except Exception as error:  # these need flash_attn 2, and compatible versions
        return f"{module} is not installed or does not import ({type(error).__name__}: {error})"
    return None


def ring_flash_attn(group: dist.ProcessGroup) -> Attention:
    """zhuzilin/ring-flash-attention, causal and laid out zigzag."""
    function = import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    return lambda q, k, v: function(q, k, v, causal=True, group=group)


def yunchang(group: dist.ProcessGroup) -> Attention:
    """feifeibear/long-context-attention, heads split over all ranks (Ulysses), causal."""
    library = import_module("yunchang")
    library.set_seq_parallel_pg(group.size(), 1, group.rank(), group.size())
    module = library.LongContextAttention(ring_impl_type="zigzag")
    return lambda q, k, v: module(q, k, v, causal=True)
