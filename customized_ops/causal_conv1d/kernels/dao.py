"""Dao-AILab's CUDA kernel, the package ``causal-conv1d`` (Dao, github.com/Dao-AILab), on GPUs.

It takes the index of each token's run, and channels as dim 1, with any strides: a buffer's channels
are passed without a copy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...along_sequence.fla_library import on_hopper
from ...ring_attention.core.kernels.window.signatures import unusable
from ..halo import Halo
from . import torch_sums
from .protocol import Filter, Request, of_gpus_alone

NAME, VERSION = "causal_conv1d", "1.6.1"
ARGUMENTS = ("x", "weight", "bias", "seq_idx", "activation")
WIDTHS, MULTIPLE = range(2, 5), 8


@cache
def _function() -> Callable[..., Any]:
    return importlib.import_module("causal_conv1d").causal_conv1d_fn


@cache  # a broken install takes long to fail
def missing() -> str | None:
    return unusable("causal-conv1d", "causal_conv1d_fn", _function, ARGUMENTS)


def refuses(given: Request) -> str | None:
    """Refuses calls that are not on a GPU, in fp64, or of shapes that its kernel does not have."""
    d, width = given.weight.shape
    if width not in WIDTHS:
        return f"takes widths of {WIDTHS[0]} to {WIDTHS[-1]}, not {width}"
    if d % MULTIPLE:
        return f"takes multiples of {MULTIPLE} channels, not {d}"
    return of_gpus_alone(given.x)


def unproven(given: Request) -> str | None:
    """The reason, for calls not compared with plain torch on GPUs: fp32 and bf16 were, on H100."""
    if given.x.dtype == torch.float16:
        return "compared in float32 and bfloat16 alone"
    if not on_hopper():
        return "compared on Hopper alone"
    found = getattr(importlib.import_module("causal_conv1d"), "__version__", "")
    return None if found == VERSION else f"compared with version {VERSION} alone"


def convolve(x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
    b, n, _ = x.shape
    if not b * n:
        return torch_sums.convolve(x, filter_, halo)
    given: dict[str, Any] = {"weight": filter_.weight, "bias": filter_.bias}
    given["activation"] = filter_.activation or None
    if len(halo.ends) > 2:
        given["seq_idx"] = halo.run.on(x.device).expand(b, n).contiguous()
    return _function()(x=x.contiguous().mT, **given).mT
