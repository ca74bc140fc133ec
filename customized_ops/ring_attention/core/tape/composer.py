"""From what a function was seen to do, to the steps of its tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .op_calls import memory, view_of
from .tape import Step, Tape


class View(NamedTuple):
    """A part of the memory of an input, or of a tensor that was made."""

    root: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int  # in elements, from where the root starts


class Note(NamedTuple):
    """A call, the tensor that it made, and the stream that it was made on."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    makes: int | None
    stream: int


@dataclass
class Seen:
    """What a function of ``inputs`` did.

    Attributes:
        roots: the inputs, and then the tensors that were made.
        numbers: of these, by the id of a tensor; all tensors are kept alive meanwhile.
        views: of their memory, by id.
    """

    inputs: int
    roots: list[Tensor | None]
    numbers: dict[int, int]
    views: dict[int, View] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def root_of(self, t: Tensor) -> int | None:
        """The tensor whose memory this is; None if it is neither an input nor was made."""
        view = self.views.get(id(t))
        return self.numbers.get(id(t)) if view is None else view.root


class Composer:
    """Makes the steps of a tape from what was seen."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._steps: list[Step] = []
        self._streams: list[int] = []  # of each step
        self._count = len(seen.roots)
        self._family: dict[int, list[int]] = {}  # of a root: itself, and its views
        self._numbers: dict[View, int] = {}
        self._uses: dict[int, list[int]] = {}  # of a root: the steps
        self._memory = {memory(t) for t in seen.roots if t is not None}

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """None where something is not known to be the same in all calls."""
        for note in self._seen.notes:
            if not self._append(note):
                return None
        stream = self._streams[-1] if self._streams else 0
        returned = [number for t in results if (number := self._number(t, stream)) is not None]
        if len(returned) < len(results):
            return None
        kept = {self._seen.root_of(t) for t in results}
        for root, uses in self._uses.items():
            # Memory that two streams use is free when both have met, at the end.
            one_stream = len({self._streams[n] for n in uses}) == 1
            if one_stream and root not in kept and root >= self._seen.inputs:
                step, family = self._steps[uses[-1]], self._family.get(root, [])
                self._steps[uses[-1]] = step._replace(frees=(*step.frees, root, *family))
        return Tape(tuple(self._steps), self._seen.inputs, tuple(returned))

    def _append(self, note: Note) -> bool:
        """The step of a note; False where it has a tensor that is not known."""
        function, arguments, makes, stream = note
        tensors = {n: a for n, a in enumerate(arguments) if torch.is_tensor(a)}
        places = {n: self._number(t, stream) for n, t in tensors.items()}
        places = {n: number for n, number in places.items() if number is not None}
        fixed = tuple(None if n in places else a for n, a in enumerate(arguments))
        if any(memory(t) in self._memory for t in _tensors_in(fixed)):
            return False
        roots = [self._seen.root_of(tensors[n]) for n in places]
        step = Step(function, fixed, tuple(places.items()), makes, ())  # type: ignore[arg-type]
        self._add(step, stream, [*roots, makes])
        return True

    def _add(self, step: Step, stream: int, roots: Sequence[int | None]) -> None:
        for root in roots:
            if root is not None:
                self._uses.setdefault(root, []).append(len(self._steps))
        self._steps.append(step)
        self._streams.append(stream)

    def _number(self, t: Tensor, stream: int) -> int | None:
        """Of a tensor of the tape; a view is made where it is first used."""
        view = self._seen.views.get(id(t))
        if view is None:
            return self._seen.numbers.get(id(t))
        if view not in self._numbers:
            number = self._numbers[view] = self._count
            self._count += 1
            self._family.setdefault(view.root, []).append(number)
            step = Step(view_of, (None, *view[1:]), ((0, view.root),), number, ())
            self._add(step, stream, [view.root])
        return self._numbers[view]


def _tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
