"""Calls of a library, whose code is not ours.

What it makes by :func:`.calls.allocate` and :func:`.calls.copied`, and kernels that it launches by
:func:`launch_kernel`, are seen. A kernel may be given tensors of the tape, and what the
library was given. The pass is not recorded if it is given any other, which the library made in a
way not seen here, or if a function of torch has written to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .making import memory
from .recorder import Recorder, all_tensors, here


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

    def finds(self, t: Tensor) -> bool:
        """See :class:`.recorder.Library`."""
        return memory(t) in self._given or self._recorder.part(t) is not None

    def add(self, made: Tensor) -> None:
        """See :class:`.recorder.Library`."""
        self._tensors.append(made)
        self._versions.append(0 if made.is_inference() else made._version)

    def launch(self, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """See :class:`.recorder.Library`."""
        self.launched = True
        self._recorder.refused |= not all(map(self.finds, all_tensors(arguments)))
        self._recorder.refused |= self._counted() != self._versions
        self._recorder.note(kernel, arguments)
        result = self._recorder.pausing(kernel, *arguments)
        self._versions = self._counted()  # stand-ins for kernels write by functions of torch
        return result

    def end(self, results: Any) -> None:
        """The library has returned ``results``."""
        known = all(self._recorder.part(t) is not None for t in all_tensors(results))
        unseen = self._counted() != self._versions
        self._recorder.refused |= unseen or not (self.launched and known)


def call_library(function: Callable[..., Any], **given: Any) -> Any:
    """``function(**given)`` of a library. If it launches nothing that is seen, or returns a tensor
    that is not, the pass is not recorded."""
    recorder = here.recorder
    if recorder is None:
        return function(**given)
    call = recorder.library = WatchedCall(recorder, given)
    try:
        results = function(**given)
    finally:
        recorder.library = None
    call.end(results)
    return results


def launch_kernel(kernel: Callable[..., Any], *arguments: Any) -> Any:
    """``kernel(*arguments)``, a kernel of the library, which returns no tensor."""
    recorder = here.recorder
    if recorder is None or recorder.library is None:
        return kernel(*arguments)
    return recorder.library.launch(kernel, arguments)
