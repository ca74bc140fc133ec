"""Which kernel takes a request."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable
from functools import lru_cache
from threading import Lock
from typing import cast

from .adapters import cudnn, cudnn_flex, flash4, flex, reference, te, torch_ops
from .adapters.flash_attn import flash2, flash3
from .protocol.kernel import Kernel
from .protocol.request import Request
from .speeds import fastest_first, seconds

# Fastest first where nothing was measured.
KERNELS: dict[str, Kernel] = {
    kernel.NAME: cast(Kernel, kernel)
    for kernel in (flash4, flash3, flash2, te, torch_ops, cudnn, flex, cudnn_flex, reference)
}

log = logging.getLogger("seqshard")
_choosing = Lock()  # a cache alone lets two threads choose, and log it, at once


class KernelError(ValueError):
    """No kernel can do what is asked, or the one named cannot."""


def check_name(op: str, name: str, others: Iterable[str] = ()) -> None:
    """Raise KernelError, which names ``op``, if there is no such kernel, here or in ``others``."""
    known = ("auto", *KERNELS, *others)
    if name not in known:
        raise KernelError(f"{op}: kernel {name!r} is unknown; known: {', '.join(known)}")


def choose(op: str, name: str, request: Request) -> Kernel:
    """The kernel called ``name``, or for ``"auto"`` the fastest one that can do the request.

    Speeds are figures of one H200 or H100, whatever the GPU. The choice is a pure function of the
    arguments and of what is installed. The first choice for a request is logged with the reasons
    against the other kernels: to the logger "seqshard" at INFO, or as a warning where "auto" has
    nothing but the slow reference for a GPU.

    Raises:
        KernelError: the name is unknown, or its kernel cannot do the request; the message names
            ``op``, the reason, and the kernels that can.
    """
    check_name(op, name)
    try:
        with _choosing:
            return _chosen(name, request)
    except KernelError as error:
        raise KernelError(f"{op}: {error}") from None


def refusal(kernel: Kernel, request: Request) -> str | None:
    """Why ``kernel`` cannot take the request on this machine, or None if it can."""
    # What is declared comes first: asking what is missing may import a large library.
    return _beyond(kernel, request) or kernel.missing()


def able(request: Request) -> list[str]:
    """The kernels that can take the request on this machine, fastest first."""
    order = fastest_first(KERNELS, request)
    return [name for name in order if refusal(KERNELS[name], request) is None]


def fastest(request: Request) -> tuple[str | None, dict[str, str]]:
    """What "auto" takes: the fastest kernel that can do a request here, if any, and why no other.

    No library is imported only to be found slower: kernels are asked what is missing in order,
    from the fastest up to the first that can do the request.
    """
    reasons = {name: _beyond(kernel, request) for name, kernel in KERNELS.items()}
    why_not = {name: reason for name, reason in reasons.items() if reason is not None}
    order = [name for name in fastest_first(KERNELS, request) if name not in why_not]
    for n, name in enumerate(order):
        lacking = KERNELS[name].missing()
        if lacking is None:
            why_not |= {later: _why_later(name, later, request) for later in order[n + 1 :]}
            return name, why_not
        why_not[name] = lacking
    return None, why_not


def _beyond(kernel: Kernel, request: Request) -> str | None:
    """Why the request is beyond what ``kernel`` declares, or None."""
    devices = {can.device: can for can in kernel.CAPABILITIES}
    if request.device.type not in devices:
        return f"runs on {', '.join(devices)}, not {request.device.type}"
    return devices[request.device.type].refuses(request)


def _why_later(taken: str, later: str, request: Request) -> str:
    """Why "auto" takes a kernel before another that might do the request too."""
    if later == reference.NAME:
        return "slower"  # than any other: it is the specification
    measured = all(math.isfinite(seconds(name, request)) for name in (taken, later))
    return "no faster, as measured on H200 and H100" if measured else "later in the order"


@lru_cache(maxsize=1024)
def _chosen(name: str, request: Request) -> Kernel:
    if name != "auto":
        return _named(name, request)
    found, why_not = fastest(request)
    if found is None:
        raise KernelError(f"no kernel can do this ({_listed(why_not)})")
    if found == reference.NAME and request.device.type == "cuda":
        shown, why = _shown(request), _listed(why_not)
        warnings.warn(f"{shown}: auto takes the slow reference ({why})", stacklevel=3)
    else:
        log.info("%s: kernel %s (%s)", _shown(request), found, _listed(why_not))
    return KERNELS[found]


def _named(name: str, request: Request) -> Kernel:
    reason = refusal(KERNELS[name], request)
    if reason is not None:
        others = ", ".join(able(request)) or "none"
        raise KernelError(f"kernel {name!r} cannot do this ({reason}); able: {others}")
    log.info("%s: kernel %s, as asked for", _shown(request), name)
    return KERNELS[name]


def _shown(request: Request) -> str:
    """A request in a line, for people."""
    features = "".join(f", {feature}" for feature in request.features)
    return (
        f"{request.shape_class} attention of about {request.tokens} tokens, "
        f"{request.q_heads}:{request.kv_heads} heads of dims {request.head_dim} and "
        f"{request.v_dim}, {request.dtype} on {request.device.type}{features}"
    )


def _listed(reasons: dict[str, str]) -> str:
    """Kernels and their reasons as text, kernels with the same reason together."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(those)}: {reason}" for reason, those in names.items())
