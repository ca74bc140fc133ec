"""Watches a function while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .composer import Composer, Note, Part
from .op_calls import (
    MAKE,
    PLAIN,
    READ,
    WRITE,
    cannot_repeat,
    in_a_row,
    kind_of,
    making,
    memory,
    written,
)
from .tape import Tape

Results = TypeVar("Results", bound=tuple[Tensor, ...])
# torch's own, which keeps a tensor's number taken, though not its memory, as StorageWeakRef does.
weak_reference: Callable[[Tensor], Any] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
# Attributes of objects that are views of memory which torch does not know.
VIEWS_OF = "__dlpack__", "data_ptr", "__array_interface__", "__cuda_array_interface__"
_recording = threading.local()


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which does something on a device and is no known function of torch.
    Its arguments may be tensors."""
    recorder = recorder_here()
    if recorder is None or not torch._C._is_torch_function_mode_enabled():
        return function(*arguments)
    with torch._C.DisableTorchFunction():  # what it calls or launches is a part of it
        recorder.note(function, arguments)
        result = function(*arguments)
        # A tensor would be the same in all calls.
        recorder.refused |= result is not None and any(True for _ in all_tensors(result))
    return result


def recorder_here() -> Recorder | None:
    """What this thread records with."""
    return getattr(_recording, "recorder", None)


def recording() -> bool:
    """Whether this thread records."""
    return recorder_here() is not None


def refuse() -> None:
    """What follows cannot be recorded: the pass goes on, and is not recorded."""
    recorder = recorder_here()
    if recorder is not None:
        recorder.refused = True


def record(
    function: Callable[[], Results], inputs: Sequence[Tensor | None]
) -> tuple[Results, Tape | None]:
    """What ``function`` returns, and its tape; None where it did something that is not seen.

    Args:
        function: of ``inputs``, which it does not change. Any other tensor that it finds is taken
            to be the same in all calls. What is not called as a function of torch is not seen, and
            must not happen: tensors that ``from_numpy`` or dlpack makes of memory that changes,
            ``set_``, writes to a storage. Nor must it enter or leave autocast.
    """
    recorder = Recorder(inputs)
    _recording.recorder = recorder
    try:
        with recorder:
            results = function()
    finally:
        _recording.recorder = None
    return results, recorder.tape(results)


class Root(NamedTuple):
    """What is known of an input, or of a tensor that was made; it is not kept itself."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int  # in its memory

    @classmethod
    def of(cls, t: Tensor) -> Root:
        return cls(t.dtype, t.shape, t.stride(), int(t.storage_offset()))

    @property
    def stop(self) -> int:
        """Where its last element ends."""
        last = sum([(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)])
        return self.start + (last + 1 if 0 not in self.shape else 0)

    def holds(self, view: Root) -> bool:
        """Whether a view in the same memory is in its range."""
        return self.start <= view.start and view.stop <= self.stop


class Recorder(TorchFunctionMode):
    """Notes the calls of one function; memory is used and freed as without it."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        given = [t for t in inputs if t is not None]
        # One tensor that is given twice may be two in another call.
        self.refused = len(set(map(id, given))) < len(given)
        self._inputs, self._device = len(inputs), given[0].device
        # Of the tensors of the tape, and of memory with the roots that are in it. While there is a
        # weak reference, no other tensor, or memory, has the same number.
        self._parts: dict[int, tuple[Any, Part]] = {}
        self._memory: dict[int, tuple[StorageWeakRef, list[int]]] = {}
        self._roots: list[Root | None] = []
        self._notes: list[Note] = []
        for t in inputs:
            self._see_root(t)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        kind = kind_of(func)
        if kind is not READ or isinstance(result, Tensor):
            self.refused |= kind is None
            if not self.refused:
                self._see(func, kind, args, kwargs or {}, result)
        return result

    def _see(self, func: Any, kind: str | None, args: Any, kwargs: Any, result: Any) -> None:
        """A call of a function that is known."""
        self.refused |= cannot_repeat(func, args, kwargs)
        if self.refused:
            return
        into = args[0] if kind is WRITE else kwargs.get("out")
        if into is not None:
            self.refused |= (result is not into and result is not None) or self._is_resized(into)
            self.note(*in_a_row(func, args, kwargs))
            return
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all([isinstance(t, Tensor) and t.device == self._device for t in results]):
            self.refused = True  # values are read, or made of others than tensors of the tape
        elif args and isinstance(args[0], Tensor) and memory(results[0]) == memory(args[0]):
            if (part := self._part(args[0])) is not None:  # else it is the same in all calls, too
                for view in results:
                    if view is not args[0]:
                        self._see_view(view, part)
        elif result is not results[0] or memory(result) in self._memory:
            self.refused = True
        elif kind is MAKE and self.is_here(args):
            self.see_made(func, args, kwargs, result)
        else:
            self.refused |= kind is READ or func.__name__ == "__getitem__"  # by values
            self.note(*in_a_row(func, args, kwargs), result)

    def see_made(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """A call of a function among :data:`.op_calls.MADE`, of tensors of the tape's device."""
        function, geometry = making(result)
        self._add(function, {}, geometry, result)
        if call := written(func, args, kwargs, result):
            self.note(*call)

    def _is_resized(self, t: Tensor) -> bool:
        """Whether it no longer looks as when it was made."""
        part = self._part(t)
        if part is None:
            return False
        root = self._roots[part.root]
        assert root is not None
        return t.shape != (root.shape if part.view is None else part.view[0])

    def is_here(self, values: Any) -> bool:
        """Whether no tensor of another device is among them."""
        return all(t.device == self._device for t in all_tensors(values))

    def note(
        self, function: Callable[..., Any], arguments: Sequence[Any], made: Tensor | None = None
    ) -> None:
        """A call, and the tensor that it made."""
        parts, same = {}, list(arguments)
        for n, argument in enumerate(arguments):
            if type(argument) in PLAIN:
                continue
            part = self._part(argument) if isinstance(argument, Tensor) else None
            if part is not None:
                parts[n], same[n] = part, None
                continue
            if type(argument) is list:
                same[n] = list(argument)  # the caller's may change
            if type(argument) is not tuple or not PLAIN.issuperset(map(type, argument)):
                # A tensor that is the same in all calls has memory of its own. If it shares memory
                # with a tensor of the tape, it is one inside a list, or was made from one in a way
                # not seen here.
                self.refused |= any(memory(t) in self._memory for t in all_tensors(argument))
                self.refused |= _hides_memory(argument)
        self._add(function, parts, tuple(same), made)

    def _add(self, function: Any, parts: Any, same: Any, made: Tensor | None) -> None:
        stream = 0
        if self._device.type == "cuda":
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        makes = None if made is None else self._see_root(made)
        self._notes.append(Note(function, parts, same, makes, stream))

    def finds(self, t: Tensor) -> bool:
        """Whether it is a tensor of the tape, or a view of one. A view that was not seen is one
        from now on, if its memory is that of a single tensor."""
        if t._cdata not in self._parts:
            _, roots = self._memory.get(memory(t), (None, ()))
            within = [n for n in roots if (root := self._roots[n]) and root.holds(Root.of(t))]
            if len(within) == 1:  # with more it could be a view of either
                self._see_view(t, Part(within[0]))
        return t._cdata in self._parts

    def _part(self, t: Tensor) -> Part | None:
        found = self._parts.get(t._cdata)
        return None if found is None else found[1]

    def _know(self, t: Tensor, part: Part) -> None:
        self._parts[t._cdata] = weak_reference(t), part

    def _see_root(self, t: Tensor | None) -> int:
        number = len(self._roots)
        self._roots.append(None if t is None else Root.of(t))
        if t is not None:
            self._know(t, Part(number))
            _, roots = self._memory.setdefault(memory(t), (StorageWeakRef(t.untyped_storage()), []))
            roots.append(number)
        return number

    def _see_view(self, view: Tensor, of: Part) -> None:
        root = self._roots[of.root]
        assert root is not None
        self.refused |= view.dtype != root.dtype
        shape, strides, start = view.shape, view.stride(), int(view.storage_offset()) - root.start
        made = of.root >= self._inputs
        if made and start == 0 and shape == root.shape and strides == root.strides:
            self._know(view, Part(of.root))
        else:
            self._know(view, Part(of.root, (shape, strides, start)))

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """Of all that was noted; None where it was refused."""
        parts = [self._part(t) for t in results]
        known = [part for part in parts if part is not None]
        if self.refused or len(known) < len(parts):
            return None
        return Composer(self._inputs, len(self._roots)).tape(self._notes, known)


def _hides_memory(value: Any) -> bool:
    """Whether it is, or contains, a view of memory that torch does not know, such as an array or
    what dlpack makes of a tensor. It would be the same in all calls."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(type(each) not in PLAIN and _hides_memory(each) for each in value)
    return not isinstance(value, (Tensor, np.generic)) and any(hasattr(value, n) for n in VIEWS_OF)


def all_tensors(value: Any) -> Iterator[Tensor]:
    """A tensor, or those in lists, tuples, dicts and dataclasses."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if type(each) not in PLAIN:
                yield from all_tensors(each)
    elif isinstance(value, Mapping):
        yield from all_tensors(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from all_tensors([getattr(value, field.name) for field in fields(value)])
