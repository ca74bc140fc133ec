"""What torch.compile leaves alone: masks and layouts are made by numpy, and never in a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made", bound=type)

REASON = "masks and layouts are made by numpy: make them outside of what is compiled as one graph"


def made_uncompiled(*methods: str) -> Callable[[Made], Made]:
    """Decorates a class whose class and static methods make values, as ``methods`` do of values
    that are there: inside of what is compiled a call of one breaks the graph, and where that may
    not be, the compiler says why."""

    def decorate(cls: Made) -> Made:
        for name in dir(cls):
            if name.startswith("_"):
                continue
            static = inspect.getattr_static(cls, name)
            if isinstance(static, classmethod | staticmethod):
                setattr(cls, name, type(static)(_left_alone(static.__func__)))
            elif name in methods:
                setattr(cls, name, _left_alone(static))
        return cls

    return decorate


def _left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    left_alone: Callable[..., Any] = torch.compiler.disable(function, reason=REASON)
    return left_alone
