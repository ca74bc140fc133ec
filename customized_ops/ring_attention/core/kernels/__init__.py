"""Single-device attention kernels behind one protocol; :func:`choose` picks one."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from . import reference, torch_sdpa
from .protocol import Capabilities, Kernel
from .scoring import Scoring, Tokens

# Fastest first: "auto" takes the first that can do the request.
KERNELS: dict[str, Kernel] = {
    module.CAPABILITIES.name: cast(Kernel, module) for module in (torch_sdpa, reference)
}


class KernelError(ValueError):
    """No kernel can do what is asked, or the one named cannot."""


def choose(op: str, name: str, q: Tensor, scoring: Scoring) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the fastest that can do the request.

    Args:
        op: who asks, for errors.
    Raises:
        KernelError: unknown name, or a kernel that cannot; says why and which can.
    """
    refusals = {n: kernel.CAPABILITIES.refuses(q, scoring) for n, kernel in KERNELS.items()}
    able = [n for n, reason in refusals.items() if reason is None]
    if name == "auto" and able:
        return KERNELS[able[0]]
    if name in able:
        return KERNELS[name]
    if name != "auto" and name not in KERNELS:
        raise KernelError(f"{op}: kernel {name!r} is unknown; known: auto, {', '.join(KERNELS)}")
    reasons = "; ".join(f"{n}: {reason}" for n, reason in refusals.items() if reason)
    raise KernelError(
        f"{op}: kernel {name!r} cannot do this ({reasons}); able: {', '.join(able) or 'none'}"
    )


__all__ = ["KERNELS", "Capabilities", "Kernel", "KernelError", "Scoring", "Tokens", "choose"]
