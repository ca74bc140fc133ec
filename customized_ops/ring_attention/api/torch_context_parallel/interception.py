"""How a program's own calls of torch's attention become calls over ranks, while a block is open.

``torch.nn.functional.scaled_dot_product_attention`` is replaced by name; in addition, a
TorchFunctionMode intercepts calls by code that bound the name earlier. Both are needed: torch takes
modes off the stack while it runs ``backward`` and ``nn.MultiheadAttention``, which is where a
checkpointed block is recomputed.

Calls that would silently attend to this rank's tokens alone are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...op.arguments import checked
from .sdpa import SequenceSharding, sdpa

ORIGINAL = F.scaled_dot_product_attention


class _Thread(threading.local):
    """The blocks open on this thread, outermost first; and whether an op of ours is running."""

    def __init__(self) -> None:
        self.open: list[SequenceSharding] = []
        self.entered: list[AbstractContextManager[None]] = []
        self.busy = False


_thread = _Thread()
_everywhere: list[tuple[int, SequenceSharding]] = []  # thread and block, of all threads
_lock = threading.Lock()


def current() -> SequenceSharding | None:
    """The block that this thread is in, if any.

    An autograd thread is in the block that is open on another thread.

    Raises:
        RuntimeError: this is an autograd thread, and several other threads have a block open.
    """
    if _thread.open:
        return _thread.open[-1]
    if not _everywhere or not _in_backward():
        return None
    if len({thread for thread, _ in _everywhere}) > 1:
        raise RuntimeError(
            "context_parallel: several threads have a block open, and autograd runs on another: "
            "it is not known which one this belongs to"
        )
    return _everywhere[-1][1]


@contextmanager
def running() -> Iterator[None]:
    """While one of our ops runs, its own calls are not intercepted."""
    before, _thread.busy = _thread.busy, True
    try:
        yield
    finally:
        _thread.busy = before


@wraps(ORIGINAL)
def _replacement(*args: Any, **kwargs: Any) -> Any:
    sharding = None if _thread.busy else current()
    return ORIGINAL(*args, **kwargs) if sharding is None else _attend(sharding, args, kwargs)


def _attend(sharding: SequenceSharding, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with running():
        return sdpa(sharding, *args, **kwargs)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _thread.busy and (func is ORIGINAL or (func in _LOCAL and not _in_backward())):
            sharding = current()
            assert sharding is not None, "a mode is on, but no block open"
            if func is ORIGINAL:
                return _attend(sharding, args, kwargs)
            checked("context_parallel", sharding.group, lambda: _refuse_local(func, kwargs))
        return func(*args, **kwargs)


def _in_backward() -> bool:
    """Whether a backward is running, where our kernels call functions that programs must not."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


# Functions that would attend to this rank's tokens alone: the argument that asks for it, and the
# reason for refusing.
_LOCAL: dict[Any, tuple[str, str]] = {
    torch.ops.higher_order.flex_attention: (
        "",
        "torch's flex_attention attends to this rank's tokens alone; call flex_attention of "
        "customized_ops.ring_attention.api.torch_context_parallel",
    ),
    F.multi_head_attention_forward: (
        "need_weights",
        "nn.MultiheadAttention with need_weights=True makes the weights of this rank's tokens "
        "alone; pass need_weights=False",
    ),
}


def _refuse_local(function: Any, kwargs: dict[str, Any]) -> None:
    switch, reason = _LOCAL[function]
    if kwargs.get(switch, True):
        raise NotImplementedError(f"context_parallel: {reason}")


@contextmanager
def attention_over(sharding: SequenceSharding) -> Iterator[None]:
    """A block in which attention is over the whole sequence."""
    here = threading.get_ident(), sharding
    with _lock:
        _everywhere.append(here)
        F.scaled_dot_product_attention = _replacement
    _thread.open.append(sharding)
    try:
        with _Mode():
            yield
    finally:
        _thread.open.pop()
        with _lock:
            _everywhere.remove(here)
            if not _everywhere:
                F.scaled_dot_product_attention = ORIGINAL


def enter(sharding: SequenceSharding) -> None:
    """Open a block on this thread; :func:`leave` closes it."""
    block = attention_over(sharding)
    block.__enter__()
    _thread.entered.append(block)


def leave() -> None:
    """Close the block that was entered last."""
    _thread.entered.pop().__exit__(None, None, None)
