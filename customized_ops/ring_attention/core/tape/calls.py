"""How a pass makes and writes tensors, and launches what a device is to do, so that a recorder sees
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from .held_tensors import all_tensors, holds_tensors
from .making import memory
from .recorder import Recorder, here
from .tape import Tape

Results = TypeVar("Results", bound=tuple[Tensor, ...])


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, which writes to tensors among its arguments, or does something else
    on a device. It makes none that anybody else sees."""
    recorder = here.recorder
    if recorder is None:
        return function(*arguments)
    recorder.note(function, arguments)
    result = recorder.pausing(function, *arguments)  # what it calls or launches is a part of it
    if result is not None and not any(result is each for each in arguments):
        recorder.refused |= holds_tensors(result)  # the same in all calls
    return result


def allocate(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``function(*args, **kwargs)``, one of those in :data:`.making.MADE`."""
    recorder = here.recorder
    if recorder is None:
        return function(*args, **kwargs)
    result = recorder.pausing(function, *args, **kwargs)
    recorder.see_made(function, args, kwargs, result)
    return result


def computed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """``function(*arguments)``, a new tensor with values of its own, or a view of an argument."""
    recorder = here.recorder
    if recorder is None:
        return function(*arguments)
    result = recorder.pausing(function, *arguments)
    where = memory(result)
    if where not in recorder.memory and where not in map(memory, all_tensors(arguments)):
        recorder.see_computed(function, arguments, result)
    return result


def copied(function: Callable[..., Tensor], t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function(t, *args, **kwargs)``, which returns ``t``, or a copy of it."""
    recorder = here.recorder
    if recorder is None:
        return function(t, *args, **kwargs)
    result = recorder.pausing(function, t, *args, **kwargs)
    if result is not t:
        recorder.see_copy(t, result)
    return result


@contextmanager
def aside() -> Iterator[None]:
    """What is done in this context is no part of a tape."""
    recorder, here.recorder = here.recorder, None
    try:
        yield
    finally:
        here.recorder = recorder


def recording() -> bool:
    """Whether this thread records."""
    return here.recorder is not None


def refuse() -> None:
    """What follows cannot be recorded: the pass goes on, and is not recorded."""
    if here.recorder is not None:
        here.recorder.refused = True


def run_tape(tape: Tape, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """``tape.run(given)``, whose steps become steps of what is recorded."""
    recorder = here.recorder
    return tape.run(given) if recorder is None else recorder.run(tape, given)


def record(
    function: Callable[[], Results], inputs: Sequence[Tensor | None]
) -> tuple[Results, Tape | None]:
    """What ``function`` returns, and its tape; None where it cannot be repeated.

    Args:
        function: of ``inputs``, which it does not change. All that it makes, writes and launches it
            makes, writes and launches by the functions above; it may view and read shapes as it
            likes. Any other tensor that it finds is taken to be the same in all calls.
        inputs: which of them share memory, and how, is the same in all calls.
    """
    recorder = here.recorder = Recorder(inputs)
    try:
        results = function()
    finally:
        here.recorder = None
    return results, recorder.tape(results)
