"""flash-linear-attention's Triton kernel (Yang and Zhang, github.com/fla-org), on GPUs.

The kernel sees a buffer's runs, each preceded by its halo, as packed sequences, so it needs no
initial states.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...along_sequence.fla_library import uncompared
from ...along_sequence.packed_sequences import packed_sequences
from ...ring_attention.core.kernels.window.signatures import unusable
from ..halo import Halo
from . import torch_sums
from .protocol import Filter, Request, of_gpus_alone

NAME = "fla"
ARGUMENTS = ("x", "weight", "bias", "activation", "cu_seqlens", "chunk_indices")


@cache
def _function() -> Callable[..., Any]:
    return importlib.import_module("fla.modules.causal_conv1d").causal_conv1d


@cache  # a broken install takes long to fail
def missing() -> str | None:
    return unusable("flash-linear-attention", "causal_conv1d", _function, ARGUMENTS)


def refuses(given: Request) -> str | None:
    return of_gpus_alone(given.x)


def unproven(given: Request) -> str | None:
    """The reason, for calls not compared with plain torch on GPUs: fp32 and bf16 were, on H100."""
    if given.x.dtype == torch.float16:
        return "compared in float32 and bfloat16 alone"
    return uncompared()


def convolve(x: Tensor, filter_: Filter, halo: Halo) -> Tensor:
    b, n, _ = x.shape
    if not b * n:
        return torch_sums.convolve(x, filter_, halo)
    given: dict[str, Any] = {"weight": filter_.weight, "bias": filter_.bias}
    given["activation"] = filter_.activation or None
    if (packed := packed_sequences(halo.ends, b)) is not None:
        given |= packed.on(x.device)
        x = x.reshape(1, b * n, -1)
    return _function()(x.contiguous(), **given)[0].reshape(b, n, -1)
