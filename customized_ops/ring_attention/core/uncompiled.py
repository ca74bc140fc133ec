"""What torch.compile leaves alone: masks, layouts and plans are numpy's, and never in a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Made = TypeVar("Made", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

REASON = (
    "masks, layouts and plans are numpy's: make and read them outside of what is compiled as one "
    "graph"
)


def made_uncompiled(*methods: str) -> Callable[[Made], Made]:
    """Decorates a class whose class and static methods make values; ``methods``, and properties,
    make or read others. Inside of what is compiled a call of one breaks the graph, and where that
    may not be, the compiler says why."""

    def decorate(cls: Made) -> Made:
        for name in dir(cls):
            static = inspect.getattr_static(cls, name)
            if isinstance(static, classmethod | staticmethod) and not name.startswith("_"):
                setattr(cls, name, type(static)(left_alone(static.__func__)))
        for name in methods:
            static = inspect.getattr_static(cls, name)
            if isinstance(static, property):
                assert static.fget is not None
                setattr(cls, name, property(left_alone(static.fget), doc=static.__doc__))
            else:
                setattr(cls, name, left_alone(static))
        return cls

    return decorate


def left_alone(function: Function) -> Function:
    """The function, in a break of the graph."""
    return cast(Function, torch.compiler.disable(function, reason=REASON))
