"""Which kernel takes a request."""

from __future__ import annotations

import logging
import warnings
from functools import lru_cache
from typing import cast

from . import cudnn, flash2, flash3, flash4, flex, reference, te, torch_ops
from .protocol import Kernel, Request
from .speeds import seconds

# Fastest first where nothing was measured.
KERNELS: dict[str, Kernel] = {
    module.NAME: cast(Kernel, module)
    for module in (flash4, flash3, flash2, te, cudnn, torch_ops, flex, reference)
}

# What is taken only by name, and why.
UNPROVEN = {
    kernel.NAME: "only by name: not yet seen right on a GPU" for kernel in (flash3, flash2, flex)
}

log = logging.getLogger("seqshard")


class KernelError(ValueError):
    """No kernel can do what is asked, or the one named cannot."""


def choose(op: str, name: str, request: Request) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the fastest proven one that can do the request.

    A pure function of its arguments and of what is installed. The first time for a request it says
    what it took and why not the others: to the logger "seqshard" at INFO, or as a warning where
    "auto" has nothing but the slow reference for a GPU.

    Args:
        op: who asks, for errors.
    Raises:
        KernelError: unknown name, or a kernel that cannot; says why and which can.
    """
    try:
        return _chosen(name, request)
    except KernelError as error:
        raise KernelError(f"{op}: {error}") from None


def able(request: Request) -> tuple[list[str], dict[str, str]]:
    """The kernels that "auto" may take for a request here, fastest first, and why no other one.

    Where a request is for a GPU this imports the libraries of the kernels for GPUs, if installed.
    """
    reasons = {
        name: refusal(kernel, request) or UNPROVEN.get(name) for name, kernel in KERNELS.items()
    }
    fit = [name for name, reason in reasons.items() if reason is None]
    # sorted() is stable: what was measured alike, or not at all, keeps the order of KERNELS.
    fastest_first = sorted(fit, key=lambda name: seconds(name, request))
    return fastest_first, {name: reason for name, reason in reasons.items() if reason is not None}


def refusal(kernel: Kernel, request: Request) -> str | None:
    """Why ``kernel`` cannot take the request on this machine, or None if it can."""
    devices = {can.device: can for can in kernel.CAPABILITIES}
    if request.device.type not in devices:
        return f"runs on {', '.join(devices)}, not {request.device.type}"
    # What is declared comes first: asking what is missing may import a large library.
    return devices[request.device.type].refuses(request) or kernel.missing()


@lru_cache(maxsize=1024)
def _chosen(name: str, request: Request) -> Kernel:
    if name != "auto" and name not in KERNELS:
        raise KernelError(f"kernel {name!r} is unknown; known: auto, {', '.join(KERNELS)}")
    if name != "auto" and refusal(KERNELS[name], request) is None:
        log.info("%s: kernel %s, as asked for", _shown(request), name)
        return KERNELS[name]
    fit, refused = able(request)
    if name != "auto" or not fit:
        why = {name: refused[name]} if name in refused else refused
        raise KernelError(
            f"kernel {name!r} cannot do this ({_listed(why)}); able: {', '.join(fit) or 'none'}"
        )
    if fit == [reference.NAME] and request.device.type == "cuda":
        message = f"{_shown(request)}: only the slow reference can do this ({_listed(refused)})"
        warnings.warn(message, stacklevel=3)
    else:
        rest = {slower: "slower" for slower in fit[1:]} | refused
        log.info("%s: kernel %s (%s)", _shown(request), fit[0], _listed(rest))
    return KERNELS[fit[0]]


def _shown(request: Request) -> str:
    """A request in a line, for people."""
    features = "".join(f", {feature}" for feature in request.features)
    return (
        f"{request.shape_class} attention of about {request.tokens} tokens, "
        f"{request.q_heads}:{request.kv_heads} heads of dims {request.head_dim} and "
        f"{request.v_dim}, {request.dtype} on {request.device.type}{features}"
    )


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
