"""Launches compiled Triton kernels with little work on the host.

At each launch, Triton itself looks up the device, the hooks of profilers, and what to tell these
hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Grid = tuple[int, int, int]
Launch = Callable[..., None]  # takes a grid, and a kernel's arguments with addresses for tensors
# Parameters of a launcher that is known here: ``args`` are metadata, what hooks are told, hooks,
# and the kernel's arguments.
KNOWN = ["self", "gridX", "gridY", "gridZ", "stream", "function", "args"]


class KnownLaunch:
    """Launches a kernel that was compiled for a GPU, which must be the current one at the call.
    Hooks that profilers have in Triton are not called."""

    def __init__(self, compiled: Any, device: int) -> None:
        self._run, self._function = compiled.run, compiled.function
        self._metadata, self._device = compiled.packed_metadata, device

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._run(*grid, stream, self._function, self._metadata, None, None, None, *arguments)


class TritonLaunch:
    """Launches a kernel in Triton's own way, where its launcher is not one that is known here."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        self._compiled[grid](*arguments)


def launch_of(compiled: Any, device: int) -> Launch:
    """The fastest way to launch a kernel that was compiled, and launched once, on a GPU."""
    launcher: Any = getattr(compiled, "run", None)
    complete = hasattr(compiled, "function") and hasattr(compiled, "packed_metadata")
    kind: Any = type(launcher)
    if complete and _parameters(kind) == KNOWN:
        return KnownLaunch(compiled, device)
    return TritonLaunch(compiled)


@cache
def _parameters(launcher: Any) -> list[str]:
    return list(inspect.signature(launcher.__call__).parameters)
