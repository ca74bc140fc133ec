"""Which kernel runs a call."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import cast

import torch

from ...ring_attention.core.kernels import KernelError
from . import fla, torch_chunks
from .protocol import Kernel, Operands

# "auto" takes the first that can and is proven.
KERNELS: dict[str, Kernel] = {kernel.NAME: cast(Kernel, kernel) for kernel in (fla, torch_chunks)}
# What is taken only by name, and why.
UNPROVEN = {fla.NAME: "only by name: not yet verified on a GPU"}
log = logging.getLogger("seqshard")


def check_name(op: str, name: str) -> None:
    """Raise KernelError, which names ``op``, if there is no such kernel."""
    if name not in ("auto", *KERNELS):
        known = ", ".join(("auto", *KERNELS))
        raise KernelError(f"{op}: kernel {name!r} is unknown; known: {known}")


def choose(op: str, name: str, x: Operands) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the first proven one of :data:`KERNELS` that
    can run the call; what it took, and why no other, is logged once for each kind of call.

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
    why_not = {**UNPROVEN, **why_not}
    taken = next(each for each in able if each not in UNPROVEN)
    reasons = "; ".join(f"{each}: {reason}" for each, reason in why_not.items())
    _say(op, taken, reasons, x.q.dtype, x.q.device.type)
    return KERNELS[taken]


@lru_cache(maxsize=256)
def _say(op: str, taken: str, reasons: str, dtype: torch.dtype, device: str) -> None:
    """At INFO; a warning where a GPU gets the slow kernel."""
    level = logging.WARNING if device == "cuda" and taken == torch_chunks.NAME else logging.INFO
    log.log(level, "%s, %s on %s: kernel %s (%s)", op, dtype, device, taken, reasons)
