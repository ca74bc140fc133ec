"""Turns the calls that a function was seen to make into the steps of its tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .making import view_of
from .tape import Step, Tape


class Part(NamedTuple):
    """A tensor of the tape: a root, which is an input or was made by a step, or a view of one.

    Attributes:
        root: its number.
        view: shape, strides, and how many elements after the root it starts; None for the root
            itself.
    """

    root: int
    view: tuple[torch.Size, tuple[int, ...], int] | None = None


class Note(NamedTuple):
    """A call that was seen.

    Attributes:
        parts: the arguments that are tensors of the tape, by their position.
        arguments: the others, with None in place of these.
        makes: the root that it made, if it made one.
        stream: that was current.
    """

    function: Callable[..., Any]
    parts: Mapping[int, Part]
    arguments: tuple[Any, ...]
    makes: int | None
    stream: int


class Composer:
    """Makes the steps of a tape of so many ``inputs`` from notes; ``roots``: how many there are."""

    def __init__(self, inputs: int, roots: int) -> None:
        self._inputs, self._count = inputs, roots
        self._steps: list[Step] = []
        self._streams: list[int] = []  # of each step
        self._views: dict[Part, int] = {}
        self._uses: dict[int, list[int]] = {}  # of a root: the steps

    def tape(self, notes: Sequence[Note], results: Sequence[Part]) -> Tape:
        """The tape of all that was noted."""
        for function, parts, arguments, makes, stream in notes:
            places = tuple([(n, self._number(part, stream)) for n, part in parts.items()])
            roots = [part.root for part in parts.values()]
            step = Step(function, arguments, places, makes, ())
            self._add(step, stream, roots if makes is None else [*roots, makes])
        stream = self._streams[-1] if self._streams else 0
        returned = tuple([self._number(part, stream) for part in results])
        self._free({part.root for part in results})
        return Tape(tuple(self._steps), tuple(range(self._inputs)), returned)

    def _add(self, step: Step, stream: int, roots: Sequence[int]) -> None:
        for root in roots:
            self._uses.setdefault(root, []).append(len(self._steps))
        self._steps.append(step)
        self._streams.append(stream)

    def _number(self, part: Part, stream: int) -> int:
        """The number of a tensor of the tape. A view becomes a step where it is first used."""
        if part.view is None:
            return part.root
        if part not in self._views:
            number = self._views[part] = self._count
            self._count += 1
            step = Step(view_of, (None, *part.view), ((0, part.root),), number, ())
            self._add(step, stream, [part.root])
        return self._views[part]

    def _free(self, kept: set[int]) -> None:
        """Free each root that was made, and its views, after its last step. A root that two
        streams use stays until the end, when the streams have met. It may go earlier once its own
        stream has no steps left: steps of the other stream have waited for it, and the next pass
        starts its streams after all that came before."""
        views: dict[int, list[int]] = {}
        for part, number in self._views.items():
            views.setdefault(part.root, []).append(number)
        last_on = {stream: n for n, stream in enumerate(self._streams)}
        for root, uses in self._uses.items():
            one_stream = len({self._streams[n] for n in uses}) == 1
            met = one_stream or last_on[self._streams[uses[0]]] < uses[-1]
            if met and root not in kept and root >= self._inputs:
                last = self._steps[uses[-1]]
                frees = (*last.frees, root, *views.get(root, []))
                self._steps[uses[-1]] = last._replace(frees=frees)
