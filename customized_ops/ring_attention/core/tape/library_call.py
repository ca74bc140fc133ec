"""Calls of a library that reads properties of its tensors so often that watching each read would
take longer than the call.

Inside such a call a recorder sees only tensors that are made by :func:`allocate` or :func:`copied`,
and kernels that are launched by :func:`launch_kernel`. A kernel may be given tensors of the tape,
those made so, and what the library was given. With any other, which the library made in a way not
seen here, the pass is not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .op_calls import MAKE, cannot_repeat, kind_of, memory
from .recorder import Recorder, all_tensors, recorder_here

_inside = threading.local()


class LibraryCall:
    """One call, of a recorder."""

    def __init__(self, recorder: Recorder, given: dict[str, Any]) -> None:
        self._recorder, self._given = recorder, {memory(t) for t in all_tensors(given)}
        self.launched = False

    def sees(self, t: Tensor) -> bool:
        """Whether it is known where a tensor comes from."""
        return self._recorder.knows(t) or memory(t) in self._given

    def add_made(self, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """A function of torch that made a tensor."""
        recorder = self._recorder
        recorder.refused |= kind_of(function) is not MAKE or cannot_repeat(function, args, kwargs)
        recorder.refused |= not recorder.is_here((*args, result))
        recorder.refused |= not all(map(self.sees, all_tensors(args)))
        if not recorder.refused:
            recorder.see_made(function, args, kwargs, result)

    def add_launch(self, kernel: Any, arguments: Any) -> None:
        """A kernel, before it is launched."""
        self.launched = True
        self._recorder.refused |= not all(map(self.sees, all_tensors(arguments)))
        self._recorder.note(kernel, arguments)


def call_library(function: Callable[..., Any], **given: Any) -> Any:
    """``function(**given)`` of a library. If it launches nothing that is seen, or returns a tensor
    that is not, the pass is not recorded."""
    recorder = recorder_here()
    if recorder is None:
        return function(**given)
    with torch._C.DisableTorchFunction():
        call = _inside.call = LibraryCall(recorder, given)
        try:
            results = function(**given)
        finally:
            _inside.call = None
        known = all(map(recorder.knows, all_tensors(results)))
        recorder.refused |= not (call.launched and known)
    return results


def allocate(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``function(*args, **kwargs)``, a function of torch that makes a tensor."""
    result = function(*args, **kwargs)
    call: LibraryCall | None = getattr(_inside, "call", None)
    if call is not None:
        call.add_made(function, args, kwargs, result)
    return result


def copied(function: Callable[..., Any], t: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(t, *args, **kwargs)``, which returns ``t``, or a copy of it."""
    result = function(t, *args, **kwargs)
    call: LibraryCall | None = getattr(_inside, "call", None)
    if call is not None and result is not t:
        call.add_made(torch.clone, (t,), {}, result)
    return result


def launch_kernel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """``kernel(*arguments)``, a kernel of the library, which returns no tensor."""
    call: LibraryCall | None = getattr(_inside, "call", None)
    if call is not None:
        call.add_launch(kernel, arguments)
    return kernel(*arguments)
