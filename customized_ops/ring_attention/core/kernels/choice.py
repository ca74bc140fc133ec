"""Which kernel takes a request."""

from __future__ import annotations

from typing import cast

from . import reference, torch_ops
from .protocol import Kernel, Request

# Fastest first where nothing was measured: "auto" takes the first that can do the request.
KERNELS: dict[str, Kernel] = {
    module.NAME: cast(Kernel, module) for module in (torch_ops, reference)
}


class KernelError(ValueError):
    """No kernel can do what is asked, or the one named cannot."""


def choose(op: str, name: str, request: Request) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the fastest that can do the request.

    Args:
        op: who asks, for errors.
    Raises:
        KernelError: unknown name, or a kernel that cannot; says why and which can.
    """
    refusals = {n: refusal(kernel, request) for n, kernel in KERNELS.items()}
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


def refusal(kernel: Kernel, request: Request) -> str | None:
    """Why ``kernel`` cannot take the request on this machine, or None if it can."""
    devices = {able.device: able for able in kernel.CAPABILITIES}
    if request.device.type not in devices:
        return f"runs on {', '.join(devices)}, not {request.device.type}"
    return kernel.missing() or devices[request.device.type].refuses(request)
