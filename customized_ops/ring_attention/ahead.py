"""Values that are made in a thread before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def made_ahead(
    source: Iterable[Given], make: Callable[[Given], Made], count: int, name: str
) -> Iterator[Made]:
    """``make`` of each of ``source``, so many in advance; the thread ends with the iterator.

    Raises:
        ValueError: ``count`` is not positive. What ``source`` or ``make`` raises is raised where
            its value is due.
    """
    if count < 1:
        raise ValueError(f"{name}: ahead must be at least 1, got {count}")
    return _made(source, make, count, name)


def _made(
    source: Iterable[Given], make: Callable[[Given], Made], count: int, name: str
) -> Iterator[Made]:
    made: SimpleQueue[tuple[list[Made], BaseException | None]] = SimpleQueue()
    room, stopped = Semaphore(count), Event()

    def work() -> None:
        try:
            for given in source:
                made.put(([make(given)], None))
                room.acquire()
                if stopped.is_set():
                    return
            made.put(([], None))
        except BaseException as error:
            made.put(([], error))

    thread = Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        while True:
            values, error = made.get()
            room.release()
            if error is not None:
                raise error
            if not values:
                return
            yield from values
    finally:
        stopped.set()
        room.release()
        thread.join()
