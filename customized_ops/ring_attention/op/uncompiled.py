"""What torch.compile leaves alone: masks, layouts and plans are numpy's, and never in a graph."""

from __future__ import annotations

import inspect
from functools import partial

import torch

from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.plan import make_plan

REASON = (
    "masks, layouts and plans are numpy's: make and read them outside of what is compiled as one "
    "graph"
)
left_alone = partial(torch.compiler.disable, reason=REASON)


def _leave_alone(cls: type, *methods: str) -> None:
    """Have the compiler break its graph, or say why it cannot, at calls of a class, of its class
    and static methods, and of ``methods`` (or properties); here and not where the class is
    declared, as planning needs no torch."""
    for name in dir(cls):
        static = inspect.getattr_static(cls, name)
        if isinstance(static, classmethod | staticmethod) and not name.startswith("_"):
            setattr(cls, name, type(static)(left_alone(static.__func__)))
    for name in ("__init__", *methods):
        static = inspect.getattr_static(cls, name)
        if isinstance(static, property):
            assert static.fget is not None
            setattr(cls, name, property(left_alone(static.fget), doc=static.__doc__))
        else:
            setattr(cls, name, left_alone(static))


_leave_alone(AttnMask, "union", "shift", "restrict", "area", "to_dense", "picture")
_leave_alone(Layout, "positions")
make_plan = left_alone(make_plan)
