"""Puts the steps of a tape together, in the order in which they are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .making import view_of
from .tape import Step, Tape

Places = tuple[tuple[int, int], ...]  # see :class:`Step`
Geometry = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, and elements after its root


class Composer:
    """The steps so far of a tape of so many ``inputs``.

    Its tensors are numbered: the inputs, and what a step makes. Each has a root: an input is its
    own, and so is a tensor with memory of its own; a view has that of the tensor that it views.
    """

    def __init__(self, inputs: int) -> None:
        self._inputs = inputs
        self._roots = list(range(inputs))  # of each tensor
        self._steps: list[Step] = []
        self._streams: list[int] = []  # of each step

    def add(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        places: Places,
        stream: int,
        makes: int | None = None,
    ) -> None:
        """A step, on a stream; see :class:`Step`."""
        self._steps.append(Step(function, arguments, places, makes, ()))
        self._streams.append(stream)

    def made(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], places: Places, stream: int
    ) -> int:
        """A step that makes a tensor with memory of its own. Returns its number."""
        number = len(self._roots)
        self._roots.append(number)
        self.add(function, arguments, places, stream, number)
        return number

    def view(self, root: int, geometry: Geometry, stream: int) -> int:
        """A step that makes a view, on the stream that is the first to use it. Returns its
        number."""
        number = len(self._roots)
        self._roots.append(root)
        self.add(view_of, (None, *geometry), ((0, root),), stream, number)
        return number

    def tape(self, results: Sequence[int]) -> Tape:
        """The tape of these steps that returns ``results``."""
        steps = self._steps
        for n, freed in self._freed({self._roots[number] for number in results}).items():
            steps[n] = steps[n]._replace(frees=tuple(freed))
        return Tape(tuple(steps), tuple(range(self._inputs)), tuple(results))

    def _freed(self, kept: set[int]) -> dict[int, list[int]]:
        """What is freed after which steps: each root that was made, and its views, after its last
        step. A root that two streams use stays until the end, when the streams have met. It may go
        earlier once its own stream has no steps left: steps of the other stream have waited for it,
        and the next pass starts its streams after all that came before."""
        last_steps: dict[int, int] = {}  # of roots
        own: dict[int, int] = {}  # the stream that made each
        shared, last_on = set(), dict[int, int]()
        for n, (step, stream) in enumerate(zip(self._steps, self._streams, strict=True)):
            last_on[stream] = n
            if step.makes is not None:
                root = self._roots[step.makes]
                last_steps[root] = n
                own.setdefault(root, stream)
            for _, number in step.places:
                root = self._roots[number]
                last_steps[root] = n
                if own.get(root) != stream:
                    shared.add(root)
        freed: dict[int, list[int]] = {}
        for number, root in enumerate(self._roots):
            last = last_steps.get(root)
            if last is None or root < self._inputs or root in kept:
                continue
            if root not in shared or last_on[own[root]] < last:
                freed.setdefault(last, []).append(number)
        return freed
