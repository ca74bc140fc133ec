"""Calls of a library that reads properties of its tensors so often that watching each read would
take longer than the call.

Inside such a call a recorder sees only tensors that are made by :func:`allocate` or :func:`copied`,
and kernels that are launched by :func:`launch_kernel`. A kernel may be given tensors of the tape,
those made so, and what the library was given. The pass is not recorded if it is given any other,
which the library made in a way not seen here, or if a function of torch has written to one of them.
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


class WatchedCall:
    """One call, of a recorder."""

    def __init__(self, recorder: Recorder, given: dict[str, Any]) -> None:
        self._recorder, self.launched = recorder, False
        self._tensors = list(all_tensors(given))
        self._given = set(map(memory, self._tensors))
        self._versions = self._counted()

    def _counted(self) -> list[int]:
        """How often functions of torch wrote to each tensor; 0 for inference tensors."""
        return [0 if t.is_inference() else t._version for t in self._tensors]

    def _finds(self, t: Tensor) -> bool:
        """Whether it is known where a tensor comes from."""
        return self._recorder.finds(t) or memory(t) in self._given

    def add_made(self, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """A function of torch that made a tensor."""
        recorder = self._recorder
        recorder.refused |= kind_of(function) is not MAKE or cannot_repeat(function, args, kwargs)
        recorder.refused |= not recorder.is_here((*args, result)) or self._finds(result)
        recorder.refused |= not all(map(self._finds, all_tensors(args)))
        if not recorder.refused:
            recorder.see_made(function, args, kwargs, result)
        self._tensors.append(result)
        self._versions.append(0 if result.is_inference() else result._version)

    def launch(self, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """``kernel(*arguments)``, noted."""
        self.launched = True
        self._recorder.refused |= not all(map(self._finds, all_tensors(arguments)))
        self._recorder.refused |= self._counted() != self._versions
        self._recorder.note(kernel, arguments)
        result = kernel(*arguments)
        self._versions = self._counted()  # stand-ins for kernels write by functions of torch
        return result

    def end(self, results: Any) -> None:
        """The library has returned ``results``."""
        known = all(map(self._recorder.finds, all_tensors(results)))
        unseen = self._counted() != self._versions
        self._recorder.refused |= unseen or not (self.launched and known)


def call_library(function: Callable[..., Any], **given: Any) -> Any:
    """``function(**given)`` of a library. If it launches nothing that is seen, or returns a tensor
    that is not, the pass is not recorded."""
    recorder = recorder_here()
    if recorder is None or not torch._C._is_torch_function_mode_enabled():
        return function(**given)
    with torch._C.DisableTorchFunction():
        call = _inside.call = WatchedCall(recorder, given)
        try:
            results = function(**given)
        finally:
            _inside.call = None
        call.end(results)
    return results


def allocate(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``function(*args, **kwargs)``, a function of torch that makes a tensor."""
    result = function(*args, **kwargs)
    call: WatchedCall | None = getattr(_inside, "call", None)
    if call is not None:
        call.add_made(function, args, kwargs, result)
    return result


def copied(function: Callable[..., Any], t: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(t, *args, **kwargs)``, which returns ``t``, or a copy of it."""
    result = function(t, *args, **kwargs)
    call: WatchedCall | None = getattr(_inside, "call", None)
    if call is not None and result is not t:
        call.add_made(torch.clone, (t,), {}, result)
    return result


def launch_kernel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """``kernel(*arguments)``, a kernel of the library, which returns no tensor."""
    call: WatchedCall | None = getattr(_inside, "call", None)
    return kernel(*arguments) if call is None else call.launch(kernel, arguments)
