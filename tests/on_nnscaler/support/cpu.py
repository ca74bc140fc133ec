"""nnscaler without CUDA: stand-ins for the few things of ``torch.cuda`` that it calls.

nnscaler 0.9 runs its parallel modules on "the current CUDA device", moves them there with
``.cuda()``, orders work with streams and events, and profiles ops with CUDA's memory statistics.
On the CPU, work is done in program order, so ordering it is nothing to do; the current device is
the CPU; and no memory is ever counted. Tracing must be told so too: ``trace_strategy="cpu"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from nnscaler.autodist.cost_database import CostDatabase
from nnscaler.graph.tracer.concrete_proxy import ConcreteAttrProxy

MEMORY_BYTES = 16 * 2**30

_profile = CostDatabase.profile_comp
_trace_attribute = ConcreteAttrProxy.__init__


class _InOrder:
    """A stream or an event where everything runs in program order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    synchronize = record = wait = wait_event = wait_stream = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _profile_here(self: CostDatabase, degree: int, parallel: bool, again: bool) -> None:
    """Not in a process for each device: there are none, and it would start without stand-ins."""
    _profile(self, degree, False, again)


def _trace_attribute_on_cpu(self: ConcreteAttrProxy, root: Any, attr: str) -> None:
    """A traced ``tensor.device`` is CUDA whatever it is, and then ``arange(device=it)`` fails."""
    _trace_attribute(self, root, attr)
    if attr == "device":
        self.value = root.value.device


_STAND_INS = {
    # One device, the CPU. `current_device` is only ever given to `device=` and `.to`.
    "set_device": _nothing,
    "device_count": lambda: 1,
    "current_device": lambda: torch.device("cpu"),
    "device": lambda _: nullcontext(),
    # Order of work.
    "Stream": _InOrder,
    "Event": _InOrder,
    "default_stream": _InOrder,
    "current_stream": _InOrder,
    "stream": lambda _: nullcontext(),
    "synchronize": _nothing,
    # Memory: a fixed amount, none of it ever in use.
    "get_device_properties": lambda _: SimpleNamespace(name="cpu", total_memory=MEMORY_BYTES),
    "mem_get_info": lambda: (MEMORY_BYTES, MEMORY_BYTES),
    "memory_allocated": lambda: 0,
    "max_memory_allocated": lambda: 0,
    "reset_peak_memory_stats": _nothing,
    "empty_cache": _nothing,
}


@contextmanager
def on_cpu(needed: bool | None = None) -> Iterator[None]:
    """Inside, nnscaler runs on the CPU. Enter it in each process that calls nnscaler.

    ``needed``: by default, only where there is no CUDA; False makes it do nothing.
    """
    if needed is None:
        needed = not torch.cuda.is_available()
    with ExitStack() as stack:
        if needed:
            for name, stand_in in _STAND_INS.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
            for kind, name, stand_in in (
                (torch.Tensor, "cuda", _itself),
                (torch.nn.Module, "cuda", _itself),
                (CostDatabase, "profile_comp", _profile_here),
                (ConcreteAttrProxy, "__init__", _trace_attribute_on_cpu),
            ):
                stack.enter_context(mock.patch.object(kind, name, stand_in))
        yield
