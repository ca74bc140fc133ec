"""flash-linear-attention's Triton kernels (Yang and Zhang, github.com/fla-org), on GPUs.

    delta rule      decay per head: chunk_gated_delta_rule     per channel: chunk_kda
    gates alone     decay per head: chunk_simple_gla           per channel: chunk_gla

Its public chunk functions are called whole (``fla_calls.py``). With a decay per head and a known
version of the library, the functions below them are called one by one (``fla_delta.py``,
``fla_gates.py``), so that states travel between ranks while a rank computes.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from ...along_sequence.fla_library import (
    TRITON,
    VERSION,
    on_hopper,
    triton_version,
    uncompared,
    version,
)
from ...along_sequence.packed_sequences import CHUNK
from ...ring_attention.core.kernels.window.signatures import unusable
from . import fla_calls, fla_delta, fla_gates
from .fla_calls import FUNCTIONS, function_of
from .protocol import Backward, Forward, Operands

NAME = "fla"
WIDEST_KEYS = 256  # of the delta rule's state kernel
ARGUMENTS = ("q", "k", "v", "g", "scale", "initial_state", "output_final_state", "cu_seqlens")
# On Hopper, Triton from 3.4 on computes a wrong gradient. 3.7.1 does not, but it reads out of
# bounds at dk = 64, dv = 32.
WRONG, NARROWEST = (3, 4), 64
# dk and dv at which all of Triton's tuning choices ran on H100: for the delta rule, and for gates.
COMPARED = {True: (128, 128), False: (128, 64)}


@cache  # a broken install takes long to fail
def missing() -> str | None:
    """The reason, if it is not installed, its arguments differ, or it refuses backwards."""
    for (delta, channels), (_, name) in FUNCTIONS.items():
        wanted = (*ARGUMENTS, "beta") if delta else ARGUMENTS
        load = partial(function_of, delta, channels)
        if problem := unusable("flash-linear-attention", name, load, wanted):
            return problem
    return None


@cache
def miscompiled(narrow: bool) -> str | None:
    """The reason, if this machine's Triton miscompiles its kernels, for all or for narrow heads."""
    if not on_hopper():
        return None
    if WRONG <= triton_version() < TRITON:
        return f"needs Triton 3.7.1 or later on Hopper, not {'.'.join(map(str, triton_version()))}"
    return f"takes dk and dv of at least {NARROWEST} on Hopper" if narrow else None


def refuses(x: Operands) -> str | None:
    """Refuses calls not in half precision on a GPU, or of widths that the library lacks."""
    if x.q.device.type != "cuda":
        return f"runs on cuda, not {x.q.device.type}"
    if x.q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.delta and x.q.shape[-1] > WIDEST_KEYS:
        return f"takes dk of at most {WIDEST_KEYS}, not {x.q.shape[-1]}"
    if not x.delta and (x.q.shape[-1] % 2 or x.v.shape[-1] % 2):  # out of bounds, in Triton
        return f"takes even dk and dv of gates alone, not {x.q.shape[-1]} and {x.v.shape[-1]}"
    return miscompiled(min(x.q.shape[-1], x.v.shape[-1]) < NARROWEST)


def unproven(x: Operands) -> str | None:
    """The reason, for all calls but those compared on H100, on one GPU and over two: with a decay
    per head, at these dims, against the library's own call and against the recurrence."""
    if x.q.dtype != torch.bfloat16:
        return "compared in bfloat16 alone"
    if (reason := uncompared()) is not None:
        return reason
    if x.channels:
        return "compared as it is for a decay a head alone"
    known, dims = COMPARED[x.delta], (x.q.shape[-1], x.v.shape[-1])
    return None if dims == known else f"compared at dk, dv = {known}, not {dims}"


@cache
def steps_known() -> bool:
    """Whether the library's inner functions may be called. They may not where it is missing, as on
    a machine that plans for others."""
    return missing() is None and version() == VERSION


def _in_steps(x: Operands) -> bool:
    return not x.channels and x.v.shape[1] > 0 and steps_known()


def kept_width(x: Operands) -> int:
    """The delta rule's steps keep the inverses of chunks, as the library does."""
    return CHUNK if x.delta and _in_steps(x) else 0


def forward(x: Operands) -> Forward:
    """The forward, in steps where the library's version is known."""
    if not _in_steps(x):
        return fla_calls.forward(x)
    return fla_delta.DeltaForward(x) if x.delta else fla_gates.GatesForward(x)


def backward(x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor) -> Backward:
    """The backward, in steps where the library's version is known."""
    if not _in_steps(x):
        return fla_calls.backward(x, initial, dout)
    if x.delta:
        return fla_delta.DeltaBackward(x, initial, kept, dout)
    return fla_gates.GatesBackward(x, initial, dout)
