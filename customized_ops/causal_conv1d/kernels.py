"""The convolution on one device: the package causal-conv1d on GPUs, else plain torch.

y_t = act(bias + Σ_j weight_j x_{t - width + 1 + j})        tokens before the document are 0
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ring_attention.core.kernels.window.signatures import lacking
from ..ring_attention.core.merge.merge import accumulation_dtype
from .halo import Halo

ACTIVATIONS = ("", "silu", "swish")  # the last two are one function
WIDTHS = (2, 3, 4)  # of causal-conv1d
log = logging.getLogger("seqshard")


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
    """[b, n, d] -> [b, n, d] of a buffer; differentiable. Tokens of a halo give anything."""
    why_not = _refused(x, filter_) or _missing()
    _say(x.dtype, x.device.type, why_not)
    return _by_library(x, filter_, halo) if why_not is None else _in_torch(x, filter_, halo)


def _in_torch(x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
    """In fp32 (fp64 for fp64)."""
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


def _by_library(x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
    documents = halo.documents.on(x.device).expand(x.shape[0], -1).contiguous()
    y = _library()(
        x=x.contiguous().transpose(1, 2),
        weight=filter_.weight,
        bias=filter_.bias,
        seq_idx=documents,
        activation=filter_.activation or None,
    )
    return y.transpose(1, 2)


def _library() -> Callable[..., Any]:
    return importlib.import_module("causal_conv1d").causal_conv1d_fn


@cache  # a broken install takes long to fail
def _missing() -> str | None:
    try:
        lacks = lacking(_library(), ("x", "weight", "bias", "seq_idx", "activation"))
    except Exception as error:  # a broken install raises anything
        return f"causal-conv1d cannot be imported: {error}"
    return f"causal_conv1d_fn does not take {', '.join(lacks)}" if lacks else None


def _refused(x: Tensor, filter_: Filter) -> str | None:
    """What causal-conv1d does not take."""
    d, width = filter_.weight.shape
    if x.device.type != "cuda":
        return f"causal-conv1d runs on cuda, not {x.device.type}"
    if x.dtype == torch.float64:
        return "causal-conv1d takes no float64"
    if width not in WIDTHS:
        return f"causal-conv1d takes a width of {WIDTHS[0]} to {WIDTHS[-1]}, not {width}"
    if d % 8:
        return f"causal-conv1d takes a multiple of 8 channels, not {d}"
    return None if x.numel() else "there are no tokens"


@lru_cache(maxsize=64)
def _say(dtype: torch.dtype, device: str, why_not: str | None) -> None:
    """At INFO, once; a warning where a GPU has no fast kernel."""
    level = logging.WARNING if device == "cuda" and why_not else logging.INFO
    taken = "causal-conv1d" if why_not is None else f"plain torch ({why_not})"
    log.log(level, "wrap_causal_conv1d_func, %s on %s: %s", dtype, device, taken)
