"""What is noted of a function while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .composer import Composer, Places
from .held_tensors import PLAIN, all_tensors, hides_memory
from .making import Elements, cannot_repeat, making, memory, view_of, written
from .tape import Tape


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


class Known(NamedTuple):
    """What is known of memory that tensors of the tape have.

    Attributes:
        reference: while it is there, no other memory has the same number.
        roots: by number, dtype and start. The last is None where a root has all elements of its
            memory, as those have that were made.
        numbers: tensors of the tape by dtype, shape, strides and start.
    """

    reference: StorageWeakRef
    roots: list[tuple[int, torch.dtype, int, Elements | None]]
    numbers: dict[tuple[Any, ...], int]


class Recorder:
    """Notes the calls of one function; memory is used and freed as without it. Where lengths change
    with every step, each step records, so what is done here for a call is little.

    Attributes:
        memory: that tensors of the tape have.
        library: whose call is under way.
    """

    library: Library | None = None

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.refused = False
        self._device = next(t.device for t in inputs if t is not None)
        self._on_gpu = self._device.type == "cuda"
        self.memory: dict[int, Known] = {}
        self._steps = Composer(len(inputs))
        self._given = {id(t): n for n, t in enumerate(inputs) if t is not None}
        for n, t in enumerate(inputs):
            if t is not None:
                whole = t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()
                self._know(t, n, None if whole else Elements.of(t), given=True)

    def pausing(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, of which nothing is seen."""
        here.recorder = None
        try:
            return function(*args, **kwargs)
        finally:
            here.recorder = self

    def see_made(self, function: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """A call of a function among :data:`.making.MADE`."""
        self.refused |= cannot_repeat(function, args, kwargs)
        self._see_new(result)
        if not self.refused and (call := written(function, args, kwargs, result)):
            self.note(*call)

    def see_copy(self, t: Tensor, result: Tensor) -> None:
        """A copy of a tensor."""
        self.refused |= self.library is not None and not self.library.finds(t)
        self._see_new(result)
        if not self.refused:
            self.note(Tensor.copy_, (result, t))

    def _see_new(self, t: Tensor) -> None:
        self.refused |= t.device != self._device or memory(t) in self.memory
        if not self.refused:
            function, geometry = making(t)
            self._know(t, self._steps.made(function, geometry, (), self._stream()))
            if self.library is not None:
                self.library.add(t)

    def see_computed(
        self, function: Callable[..., Any], arguments: Sequence[Any], result: Tensor
    ) -> None:
        """A call that makes a tensor with memory of its own."""
        same, places, _ = self._sorted(arguments)
        self._know(result, self._steps.made(function, same, places, self._stream()))

    def note(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
        """A call that makes no tensor. Returns those that it is given and that are none of the
        tape."""
        same, places, others = self._sorted(arguments)
        self._steps.add(function, same, places, self._stream())
        return others

    def _sorted(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], Places, list[Tensor]]:
        """The arguments with None in place of tensors of the tape, and which tensors these are;
        and all other tensors, which are the same in all calls. Such a tensor has memory of its own:
        if it shares memory with one of the tape, it is inside a list, or has elements of
        several."""
        places: list[tuple[int, int]] = []
        same, others = list(arguments), list[Tensor]()
        for n, argument in enumerate(arguments):
            kind = type(argument)
            if kind in PLAIN:
                continue
            if kind is list:
                same[n] = list(argument)  # the caller's may change
            if (kind is tuple or kind is list) and PLAIN.issuperset(map(type, argument)):
                continue
            if isinstance(argument, Tensor):
                number = self.number(argument)
                if number is not None:
                    places.append((n, number))
                    same[n] = None
                    continue
                held = [argument]
            else:
                held = list(all_tensors(argument))
                self.refused |= hides_memory(argument)
            for t in held:
                self.refused |= memory(t) in self.memory
                others.append(t)
        return tuple(same), tuple(places), others

    def _stream(self) -> int:
        """The current stream."""
        return torch._C._cuda_getCurrentRawStream(self._device.index) if self._on_gpu else 0

    def number(self, t: Tensor) -> int | None:
        """Which tensor of the tape it is, or is a view of. Tensors of the tape that share memory do
        so alike in all calls, so any of them that has the view's elements will do."""
        if (number := self._given.get(id(t))) is not None:
            return number
        if (known := self.memory.get(t.untyped_storage()._cdata)) is None:
            return None
        geometry = t.dtype, t.shape, t.stride(), t.storage_offset()
        number = known.numbers.get(geometry)
        if number is None:
            number = self._view(known, t)
            if number is not None:
                known.numbers[geometry] = number
        return number

    def _view(self, known: Known, t: Tensor) -> int | None:
        """The number of a new view; None where no root has its elements."""
        view = Elements.of(t)
        for root, dtype, start, has in known.roots:
            if dtype == t.dtype and (has is None or has.holds(view)):
                geometry = view.shape, view.strides, view.start - start
                return self._steps.view(root, geometry, self._stream())
        return None

    def _know(
        self, t: Tensor, number: int, has: Elements | None = None, *, given: bool = False
    ) -> None:
        """A root. One that is given is known by itself alone: what has its geometry may need no
        gradient, as some kernels want it."""
        storage, start = t.untyped_storage(), int(t.storage_offset())
        known = self.memory.get(storage._cdata)
        if known is None:
            known = self.memory[storage._cdata] = Known(StorageWeakRef(storage), [], {})
        known.roots.append((number, t.dtype, start, has))
        if not given:
            known.numbers[t.dtype, t.shape, t.stride(), start] = number

    def run(self, tape: Tape, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Runs another tape, and notes its steps."""
        tensors = dict(zip(tape.inputs, given, strict=True))
        numbers = {n: None if t is None else self.number(t) for n, t in tensors.items()}
        for n, t in tensors.items():  # as in :meth:`_sorted`
            self.refused |= t is not None and numbers[n] is None and memory(t) in self.memory
        for step in tape.steps:
            arguments, same = list(step.arguments), list(step.arguments)
            places: list[tuple[int, int]] = []
            for at, n in step.places:
                arguments[at] = tensors[n]
                if (number := numbers[n]) is None:
                    same[at] = tensors[n]
                else:
                    places.append((at, number))
            result = self.pausing(step.function, *arguments)
            noted = step.function, tuple(same), tuple(places), self._stream()
            if step.makes is None:
                self._steps.add(*noted)
            elif step.function is view_of:
                tensors[step.makes], numbers[step.makes] = result, self.number(result)
            else:
                tensors[step.makes], number = result, self._steps.made(*noted)
                numbers[step.makes] = number
                self._know(result, number)
            for n in step.frees:
                del tensors[n]
        results: Any = tuple([tensors[n] for n in tape.results])
        return results  # type: ignore[no-any-return]

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """Of all that was noted; None where it was refused."""
        numbers = [self.number(t) for t in results]
        known = [number for number in numbers if number is not None]
        if self.refused or len(known) < len(numbers):
            return None
        return self._steps.tape(known)
