"""Which kernel runs a call."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import cast

import torch

from ...ring_attention.core.kernels import KernelError
from . import fla, torch_chunks
from .protocol import Kernel, Operands

# "auto" takes the first that can.
KERNELS: dict[str, Kernel] = {kernel.NAME: cast(Kernel, kernel) for kernel in (fla, torch_chunks)}
log = logging.getLogger("seqshard")


def check_name(op: str, name: str) -> None:
    """Raise KernelError, which names ``op``, if there is no such kernel."""
    if name not in ("auto", *KERNELS):
        known = ", ".join(("auto", *KERNELS))
        raise KernelError(f"{op}: kernel {name!r} is unknown; known: {known}")


def choose(op: str, name: str, x: Operands) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the first of :data:`KERNELS` that can run the
    call; what it took, and why no other, is logged once for each kind of call.

    Raises:
        KernelError: unknown name, or a kernel that cannot; says why, and which can.
    """
    check_name(op, name)
    why_not = {
        each: reason
        for each, kernel in KERNELS.items()
        if (reason := kernel.refuses(x) or kernel.missing()) is not None
    }
    able = [each for each in KERNELS if each not in why_not]
    if name != "auto":
        if name in why_not:
            raise KernelError(
                f"{op}: kernel {name!r} cannot do this ({why_not[name]}); able: {', '.join(able)}"
            )
        return KERNELS[name]
    reasons = "; ".join(f"{each}: {reason}" for each, reason in why_not.items())
    _say(op, able[0], reasons, x.q.dtype, x.q.device.type)
    return KERNELS[able[0]]


@lru_cache(maxsize=256)
def _say(op: str, taken: str, reasons: str, dtype: torch.dtype, device: str) -> None:
    """At INFO; a warning where a GPU gets the slow kernel."""
    level = logging.WARNING if device == "cuda" and taken == torch_chunks.NAME else logging.INFO
    log.log(level, "%s, %s on %s: kernel %s (%s)", op, dtype, device, taken, reasons)
