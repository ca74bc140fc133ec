"""Which modules call a function, where nobody hands them on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def calling_modules() -> Iterator[tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Modules whose methods run in this thread, the innermost first, with the locals of these.
    Locals that are looked at are kept by their frame, tensors among them."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            given = frame.f_locals
            if isinstance(given.get("self"), torch.nn.Module):
                yield given["self"], given
        frame = frame.f_back
