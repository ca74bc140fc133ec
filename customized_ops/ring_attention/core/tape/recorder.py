"""Watches a function while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .composer import Composer, Note, Seen, View
from .op_calls import EMPTY, UNSEEN, ZEROS, geometry, in_a_row, making, memory
from .tape import Tape

Results = TypeVar("Results", bound=tuple[Tensor, ...])
_recording = threading.local()


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which does something on a device that torch does not dispatch; its
    arguments may be tensors."""
    recorder: Recorder | None = getattr(_recording, "recorder", None)
    if recorder is not None:
        recorder.note(function, arguments)
    return function(*arguments)


def recording() -> bool:
    """Whether this thread records."""
    return getattr(_recording, "recorder", None) is not None


def refuse() -> None:
    """What follows cannot be recorded: the pass goes on, and is not recorded."""
    recorder: Recorder | None = getattr(_recording, "recorder", None)
    if recorder is not None:
        recorder.refused = True


def record(
    function: Callable[[], Results], inputs: Sequence[Tensor | None]
) -> tuple[Results, Tape | None]:
    """What ``function`` returns, and its tape; None where it did something that is not seen.

    Args:
        function: of ``inputs``, which it does not change. Any other tensor that it finds is the
            same in all calls.
    """
    recorder = Recorder(inputs)
    _recording.recorder = recorder
    try:
        with recorder:
            results = function()
    finally:
        _recording.recorder = None
    return results, recorder.tape(results)


class Recorder(TorchDispatchMode):
    """Notes the calls of one function.

    All tensors that it meets are kept until the end, so that each has an id of its own.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.refused = False
        self._device = next(t.device for t in inputs if t is not None)
        numbers = {id(t): n for n, t in enumerate(inputs) if t is not None}
        self._seen = Seen(len(inputs), list(inputs), numbers)
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._kept.append((args, result))
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(tag in func.tags for tag in UNSEEN) or not all(map(torch.is_tensor, results)):
            self.refused = True
        elif func._schema.is_mutable:
            self.note(*in_a_row(func, args, kwargs))
        elif args and torch.is_tensor(args[0]) and memory(results[0]) == memory(args[0]):
            for view in results:
                if view is not args[0]:
                    self._see_view(view, args[0])
        elif len(results) > 1:
            self.refused = True
        elif func._schema.name in (*EMPTY, *ZEROS):
            self.note(*making(result), result)
            if func._schema.name in ZEROS:
                self.note(Tensor.zero_, (result,))
        else:
            self.note(*in_a_row(func, args, kwargs), result)
        return result

    def note(
        self, function: Callable[..., Any], arguments: Sequence[Any], made: Tensor | None = None
    ) -> None:
        """A call, and the tensor that it made."""
        seen, stream, makes = self._seen, 0, None
        if self._device.type == "cuda":
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if made is not None:
            makes = seen.numbers[id(made)] = len(seen.roots)
            seen.roots.append(made)
        self._kept.append(arguments)
        seen.notes.append(Note(function, tuple(arguments), makes, stream))

    def _see_view(self, view: Tensor, of: Tensor) -> None:
        seen, root = self._seen, self._seen.root_of(of)
        if root is None:
            return  # of a tensor that is the same in all calls: so is the view
        whole = seen.roots[root]
        assert whole is not None
        self.refused |= view.dtype != whole.dtype
        offset = int(view.storage_offset() - whole.storage_offset())
        if root >= seen.inputs and not offset and geometry(view) == geometry(whole):
            seen.numbers[id(view)] = root
        else:
            seen.views[id(view)] = View(root, view.shape, view.stride(), offset)

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """Of all that was noted; None where it was refused."""
        return None if self.refused else Composer(self._seen).tape(results)
