"""Calls of a library, whose code is not ours.

What it makes by :func:`.calls.allocate` and :func:`.calls.copied`, and kernels that it launches by
:func:`launch_kernel`, are seen. A kernel may be given tensors of the tape, and what the
library was given. The pass is not recorded if it is given any other, which the library made in a
way not seen here, or if a function of torch has written to one of them (kernels do not tell torch
what they write).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .held_tensors import all_tensors
from .making import memory
from .recorder import Recorder, here


class WatchedCall:
    """One call, of a recorder."""

    def __init__(self, recorder: Recorder, given: dict[str, Any]) -> None:
        self._recorder, self.launched = recorder, False
        self._given: set[int] = set()
        self._versions: list[tuple[Tensor, int]] = []  # functions of torch count what they write
        for t in all_tensors(given):
            self._given.add(memory(t))
            self.add(t)

    def finds(self, t: Tensor) -> bool:
        """See :class:`.recorder.Library`."""
        return memory(t) in self._given or self._recorder.number(t) is not None

    def add(self, made: Tensor) -> None:
        """See :class:`.recorder.Library`."""
        if not made.is_inference():  # which have no versions
            self._versions.append((made, made._version))

    def launch(self, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """See :class:`.recorder.Library`."""
        self.launched = True
        others = self._recorder.note(kernel, arguments)
        self._recorder.refused |= not self._given.issuperset(map(memory, others))
        return self._recorder.pausing(kernel, *arguments)

    def end(self, results: Any) -> None:
        """The library has returned ``results``."""
        known = all([self._recorder.number(t) is not None for t in all_tensors(results)])
        unseen = any([t._version != version for t, version in self._versions])
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
