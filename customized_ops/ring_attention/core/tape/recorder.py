"""What is noted of a function while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .composer import Composer, Note, Part
from .making import cannot_repeat, making, memory, written
from .tape import Tape

# torch's own, which keeps a tensor's number taken, though not its memory, as StorageWeakRef does.
weak_reference: Callable[[Tensor], Any] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
# Types of most arguments that are no tensors, and hold none.
PLAIN = {type(None), int, float, bool, str, torch.Size, torch.dtype, torch.device}
# Attributes of objects that are views of memory which torch does not know.
VIEWS_OF = "__dlpack__", "data_ptr", "__array_interface__", "__cuda_array_interface__"


class Here(threading.local):
    """What this thread records with."""

    recorder: Recorder | None = None


here = Here()


class Library(Protocol):
    """The call of a library that is under way."""

    def finds(self, t: Tensor) -> bool:
        """Whether it is known where a tensor comes from."""

    def add(self, made: Tensor) -> None:
        """A tensor that was seen to be made."""

    def launch(self, kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """``kernel(*arguments)``, noted."""


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
    def last(self) -> int:
        """Where its last element is."""
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return self.start + sum(steps)

    def holds(self, view: Root) -> bool:
        """Whether the first and the last element of a view in the same memory are among its own."""
        if 0 in view.shape:
            return True
        return 0 not in self.shape and self._has(view.start) and self._has(view.last)

    def _has(self, place: int) -> bool:
        rest = place - self.start
        if rest < 0:
            return False
        for stride, n in sorted(zip(self.strides, self.shape, strict=True), reverse=True):
            if n > 1 and stride:
                index, rest = divmod(rest, stride)
                if index >= n:
                    return False
        return rest == 0


class Recorder:
    """Notes the calls of one function; memory is used and freed as without it.

    Attributes:
        memory: of the tensors of the tape, with the roots that are in it.
        library: whose call is under way.
    """

    library: Library | None = None

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.refused, self._inputs = False, len(inputs)
        self._device = next(t.device for t in inputs if t is not None)
        # Of the tensors of the tape. While there is a weak reference, no other tensor, or memory,
        # has the same number.
        self._parts: dict[int, tuple[Any, Part]] = {}
        self.memory: dict[int, tuple[StorageWeakRef, list[int]]] = {}
        self._roots: list[Root | None] = []
        self._notes: list[Note] = []
        for t in inputs:
            self._see_root(t)

    def pausing(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, of which nothing is seen."""
        here.recorder = None
        try:
            return function(*args, **kwargs)
        finally:
            here.recorder = self

    def see_made(self, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """A call of a function among :data:`.making.MADE`."""
        self.refused |= result.device != self._device or memory(result) in self.memory
        self.refused |= cannot_repeat(function, args, kwargs)
        if not self.refused:
            self._see_new(result)
            if call := written(function, args, kwargs, result):
                self.note(*call)

    def see_copy(self, t: Tensor, result: Tensor) -> None:
        """A copy of a tensor."""
        self.refused |= result.device != self._device or memory(result) in self.memory
        self.refused |= self.library is not None and not self.library.finds(t)
        if not self.refused:
            self._see_new(result)
            self.note(Tensor.copy_, (result, t))

    def _see_new(self, t: Tensor) -> None:
        function, geometry = making(t)
        self._add(function, {}, geometry, t)
        if self.library is not None:
            self.library.add(t)

    def note(
        self, function: Callable[..., Any], arguments: Sequence[Any], made: Tensor | None = None
    ) -> None:
        """A call, and the tensor that it made."""
        parts, same = {}, list(arguments)
        for n, argument in enumerate(arguments):
            if type(argument) in PLAIN:
                continue
            if isinstance(argument, Tensor) and (part := self.part(argument)) is not None:
                parts[n], same[n] = part, None
                continue
            if type(argument) is list:
                same[n] = list(argument)  # the caller's may change
            if type(argument) is not tuple or not PLAIN.issuperset(map(type, argument)):
                # A tensor that is the same in all calls has memory of its own. If it shares memory
                # with a tensor of the tape, it is one inside a list, or has elements of several.
                self.refused |= any(memory(t) in self.memory for t in all_tensors(argument))
                self.refused |= _hides_memory(argument)
        self._add(function, parts, tuple(same), made)

    def _add(self, function: Any, parts: Any, same: Any, made: Tensor | None) -> None:
        stream = 0
        if self._device.type == "cuda":
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        makes = None if made is None else self._see_root(made)
        self._notes.append(Note(function, parts, same, makes, stream))

    def part(self, t: Tensor) -> Part | None:
        """Which tensor of the tape it is, or is a view of. Tensors of the tape that share memory do
        so alike in all calls, so any of them that has the view's elements will do."""
        known = self._parts.get(t._cdata)
        if known is not None:
            return known[1]
        _, roots = self.memory.get(memory(t), (None, ()))
        if not roots:
            return None
        view = Root.of(t)
        for n in roots:
            root = self._roots[n]
            assert root is not None, "memory is of tensors"
            if root.dtype == view.dtype and root.holds(view):
                return self._see_view(t, view, root, n)
        return None

    def _know(self, t: Tensor, part: Part) -> Part:
        self._parts[t._cdata] = weak_reference(t), part
        return part

    def _see_root(self, t: Tensor | None) -> int:
        number = len(self._roots)
        self._roots.append(None if t is None else Root.of(t))
        if t is not None:
            self._know(t, Part(number))
            _, roots = self.memory.setdefault(memory(t), (StorageWeakRef(t.untyped_storage()), []))
            roots.append(number)
        return number

    def _see_view(self, t: Tensor, view: Root, root: Root, of: int) -> Part:
        if of >= self._inputs and view == root:
            return self._know(t, Part(of))
        return self._know(t, Part(of, (view.shape, view.strides, view.start - root.start)))

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """Of all that was noted; None where it was refused."""
        parts = [self.part(t) for t in results]
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
