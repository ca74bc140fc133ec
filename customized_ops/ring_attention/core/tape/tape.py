"""The steps of a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .held_tensors import all_tensors
from .making import view_of

# Runs of tapes of one form before it is compiled. Compiling takes 20 to 40 us for each step, and
# saves a quarter of a microsecond of it in every run.
OFTEN = 128


class Step(NamedTuple):
    """A call, some of whose arguments are tensors of the tape.

    Attributes:
        arguments: all of them, with None in place of tensors of the tape.
        places: pairs (argument, tensor of the tape), by number.
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
    """The steps of a function of ``inputs``; ``results`` are the tensors that it returns.

    Steps that came often run as one generated Python function with a line for each, which takes
    three quarters of the time of a loop over them. ``print(tape.source)`` shows it.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]

    def apart(self) -> tuple[Tape, Tape] | None:
        """The tape cut in two. The first part has no inputs and allocates the results, and what
        they are views of. The second is given the inputs and all that the first made, writes the
        results, and returns nothing. None where a result is an input, or is made from one or from
        a tensor that all calls share."""
        makers = {step.makes: step for step in self.steps if step.makes is not None}
        made = dict.fromkeys(self.results)
        for number in self.results:
            step = makers.get(number)
            if step is not None and step.function is view_of:
                ((_, number),) = step.places
                made[number], step = None, makers.get(number)
            if step is None or step.places or any(map(torch.is_tensor, step.arguments)):
                return None
        if len(set(self.results)) < len(self.results):
            return None
        first = tuple([s._replace(frees=()) for s in self.steps if s.makes in made])
        rest = tuple([s for s in self.steps if s.makes not in made])
        return Tape(first, (), tuple(made)), Tape(rest, (*self.inputs, *made), ())

    @property
    def constants(self) -> Iterator[Tensor]:
        """The tensors that all calls share, also those inside other arguments."""
        return (t for step in self.steps for t in all_tensors(step.arguments))

    def with_arguments(self, other: Callable[[Any], Any]) -> Tape:
        """The tape with ``other(a)`` for each argument ``a`` that is no tensor of the tape."""
        steps = (s._replace(arguments=tuple(map(other, s.arguments))) for s in self.steps)
        return replace(self, steps=tuple(steps))

    @property
    def source(self) -> str:
        """The steps in Python. Tensor n is ``tn``, the function of step n is ``fn``, and its other
        arguments are ``an_0``, ``an_1`` and so on."""
        return _source(*self._form)

    @property
    def _form(self) -> tuple[Any, ...]:
        """What the source depends on."""
        steps = tuple([(len(s.arguments), s.places, s.makes, s.frees) for s in self.steps])
        return steps, self.inputs, self.results

    @cached_property
    def _code(self) -> Code:
        return _code_of(*self._form)

    @cached_property
    def _function(self) -> Callable[..., tuple[Tensor, ...]]:
        return self._code.maker([step[:2] for step in self.steps])

    def run(self, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Runs the steps on tensors shaped as those that they were recorded with."""
        if (code := self._code).runs >= OFTEN:
            return self._function(*given)
        code.runs += 1
        return self._run(given)

    def _run(self, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The same, step by step."""
        tensors: dict[int, Any] = dict(zip(self.inputs, given, strict=True))
        for function, same, places, makes, frees in self.steps:
            arguments = list(same)
            for at, number in places:
                arguments[at] = tensors[number]
            if makes is None:
                function(*arguments)
            else:
                tensors[makes] = function(*arguments)
            for number in frees:
                del tensors[number]
        return tuple([tensors[number] for number in self.results])


Form = tuple[tuple[int, tuple[tuple[int, int], ...], int | None, tuple[int, ...]], ...]
Numbers = tuple[int, ...]


def _source(steps: Form, inputs: Numbers, results: Numbers) -> str:
    """See :attr:`Tape.source`."""
    lines = [f"def run({', '.join(f't{n}' for n in inputs)}):"]
    for n, (count, places, makes, frees) in enumerate(steps):
        given = [f"a{n}_{place}" for place in range(count)]
        for place, number in places:
            given[place] = f"t{number}"
        made = "" if makes is None else f"t{makes} = "
        freed = "".join(f"; del t{number}" for number in frees)
        lines.append(f"{made}f{n}({', '.join(given)}){freed}")
    lines.append(f"return ({''.join(f't{n}, ' for n in results)})")
    return "\n    ".join(lines)


@dataclass
class Code:
    """The code of all tapes of one form. Batches of other lengths have tapes of the same few.

    Attributes:
        runs: how often tapes ran step by step.
    """

    form: tuple[Form, Numbers, Numbers]
    runs: int = 0

    @cached_property
    def maker(self) -> Callable[[Sequence[tuple[Any, ...]]], Callable[..., tuple[Tensor, ...]]]:
        """Makes the function of a tape from the functions and arguments of its steps."""
        each = []
        for n, (count, *_) in enumerate(self.form[0]):
            each.append(f"(f{n}, ({''.join(f'a{n}_{m}, ' for m in range(count))}))")
        run = _source(*self.form).replace("\n", "\n    ")
        names: dict[str, Any] = {}
        source = f"def make(steps):\n    [{', '.join(each)}] = steps\n    {run}\n    return run"
        exec(compile(source, "<tape>", "exec"), names)
        made: Callable[..., Any] = names["make"]
        return made


@lru_cache(maxsize=256)
def _code_of(*form: Any) -> Code:
    return Code(form)
