"""The steps of a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """A call: of its arguments those in ``places`` (argument, tensor) are tensors of the tape.

    Attributes:
        makes: the tensor that it returns, if it is a new one.
        frees: tensors that are not used after it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    makes: int | None
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Tape:
    """The steps of a function of tensors; ``results`` are those that it returns."""

    steps: tuple[Step, ...]
    tensors: int
    results: tuple[int, ...]

    def run(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The function of other tensors, shaped as those that it was recorded with."""
        tensors: list[Any] = [*inputs, *[None] * (self.tensors - len(inputs))]
        for function, arguments, places, makes, frees in self.steps:
            given = list(arguments)
            for place, number in places:
                given[place] = tensors[number]
            made = function(*given)
            if makes is not None:
                tensors[makes] = made
            for number in frees:
                tensors[number] = None
        return tuple([tensors[number] for number in self.results])
