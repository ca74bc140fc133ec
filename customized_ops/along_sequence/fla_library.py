"""flash-linear-attention, which several ops call: versions and machines that were compared."""

from __future__ import annotations

import importlib
from functools import cache

import torch

VERSION = "0.6.0"
HOPPER, TRITON = (9, 0), (3, 7, 1)


def version() -> str:
    """The version of the library, which must be installed."""
    return str(getattr(importlib.import_module("fla"), "__version__", ""))


def triton_version() -> tuple[int, ...]:
    """The version of Triton, which must be installed."""
    text: str = importlib.import_module("triton").__version__
    return tuple(int(n) for n in text.split("+")[0].split(".")[:3])


def on_hopper() -> bool:
    """Whether the current GPU is a Hopper GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER


@cache
def uncompared() -> str | None:
    """Why this machine's setup was not compared; None if it was, on H100."""
    if version() != VERSION:
        return f"compared with version {VERSION} alone"
    if not on_hopper():
        return "compared on Hopper alone"
    known, found = (".".join(map(str, each)) for each in (TRITON, triton_version()))
    return None if triton_version() >= TRITON else f"compared with Triton {known}, not {found}"
