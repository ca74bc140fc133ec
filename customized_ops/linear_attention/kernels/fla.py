"""flash-linear-attention's Triton kernels (Yang and Zhang, github.com/fla-org), on GPUs.

    delta rule      a decay a head: chunk_gated_delta_rule     a channel: chunk_kda
    gates alone     a decay a head: chunk_simple_gla           a channel: chunk_gla

Its public chunk functions are called whole (``fla_calls.py``). With a decay a head and a version
that is known, the functions below them are called one by one (``fla_delta.py``, ``fla_gates.py``),
so that states travel between ranks while a rank computes.
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
# On Hopper Triton from 3.4 on computes a wrong gradient; 3.7.1 does not, but at dk = 64, dv = 32
# reads out of bounds.
WRONG, NARROWEST = (3, 4), 64
# dk and dv at which all that Triton tunes over ran on H100: of the delta rule, of gates alone.
COMPARED = {True: (128, 128), False: (128, 64)}


@cache  # a broken install takes long to fail
def missing() -> str | None:
    """That it is not installed, or has other arguments than these, or that it refuses backwards."""
    for (delta, channels), (_, name) in FUNCTIONS.items():
        wanted = (*ARGUMENTS, "beta") if delta else ARGUMENTS
        load = partial(function_of, delta, channels)
        if problem := unusable("flash-linear-attention", name, load, wanted):
            return problem
    return None


@cache
def miscompiled(narrow: bool) -> str | None:
    """That this machine's Triton makes wrong code of its kernels, for narrow heads or all."""
    if not on_hopper():
        return None
    if WRONG <= triton_version() < TRITON:
        return f"needs Triton 3.7.1 or later on Hopper, not {'.'.join(map(str, triton_version()))}"
    return f"takes dk and dv of at least {NARROWEST} on Hopper" if narrow else None


def refuses(x: Operands) -> str | None:
    """Calls that are not in half precision on a GPU, or of widths that the library has not."""
    if x.q.device.type != "cuda":
        return f"runs on cuda, not {x.q.device.type}"
    if x.q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.beta is not None and x.q.shape[-1] > WIDEST_KEYS:
        return f"takes dk of at most {WIDEST_KEYS}, not {x.q.shape[-1]}"
    if x.beta is None and (x.q.shape[-1] % 2 or x.v.shape[-1] % 2):  # out of bounds, in Triton
        return f"takes even dk and dv of gates alone, not {x.q.shape[-1]} and {x.v.shape[-1]}"
    return miscompiled(min(x.q.shape[-1], x.v.shape[-1]) < NARROWEST)


def unproven(x: Operands) -> str | None:
    """All but what was compared on H100, alone and over two: a decay a head, at these dims with the
    library's own call and with the recurrence."""
    if x.q.dtype != torch.bfloat16:
        return "compared in bfloat16 alone"
    if (reason := uncompared()) is not None:
        return reason
    if x.g.ndim == 4:
        return "compared as it is for a decay a head alone"
    known, dims = COMPARED[x.beta is not None], (x.q.shape[-1], x.v.shape[-1])
    return None if dims == known else f"compared at dk, dv = {known}, not {dims}"


@cache
def steps_known() -> bool:
    """Whether the library's parts may be called; not where it is missing, as on a machine that
    plans for others."""
    return missing() is None and version() == VERSION


def _in_steps(x: Operands) -> bool:
    return x.g.ndim == 3 and x.v.shape[1] > 0 and steps_known()


def kept_width(x: Operands) -> int:
    """The delta rule's steps keep the inverses of chunks, as the library does."""
    return CHUNK if x.beta is not None and _in_steps(x) else 0


def forward(x: Operands) -> Forward:
    """In steps where the library is known."""
    if not _in_steps(x):
        return fla_calls.forward(x)
    return fla_gates.GatesForward(x) if x.beta is None else fla_delta.DeltaForward(x)


def backward(x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor) -> Backward:
    """The same."""
    if not _in_steps(x):
        return fla_calls.backward(x, initial, dout)
    if x.beta is None:
        return fla_gates.GatesBackward(x, initial, dout)
    return fla_delta.DeltaBackward(x, initial, kept, dout)
