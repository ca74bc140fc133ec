"""Finds the modules that call a function, where they are not passed as arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def calling_modules() -> Iterator[tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Modules whose methods run in this thread, the innermost first, with those methods' locals.
    A frame keeps its locals alive once they were looked at, tensors included."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            given = frame.f_locals
            if isinstance(given.get("self"), torch.nn.Module):
                yield given["self"], given
        frame = frame.f_back
