"""Calls of declared functions, seen by nnscaler's tracer wherever they are written.

The tracer rewrites each function that a traced function calls, and puts its own in the place of a
registered one where that is a name of the module of the function itself or of a module's class. A
call through a package (``ring_attention.wrap_ring_attn_func``), in another module's helper, out of
a table or of a ``functools.partial`` would be traced into.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nnscaler.graph.tracer.operator_patcher import OperatorPatcher, OperatorPatcherContext

from .op_node import is_registered

_rewritten = OperatorPatcher.patch_func_helper


def _seen(patcher: OperatorPatcher, function: Any) -> Any:
    """What the tracer calls instead of ``function``, which is called by a traced function."""
    called = function.func if isinstance(function, partial) else function
    if not is_registered(called):
        return _rewritten(patcher, function)
    _, wrapped = OperatorPatcherContext.ctx_tracer.wrapped_leaf[called]
    return wrapped if called is function else partial(wrapped, *function.args, **function.keywords)


def see_every_call() -> None:
    """Have nnscaler's tracer see every call that a traced function makes."""
    OperatorPatcher.patch_func_helper = _seen
