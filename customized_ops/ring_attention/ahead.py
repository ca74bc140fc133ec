"""Batches that are made before they are asked for: in a thread here, or in a loader's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def require_same(packed_by: Any, asked: Any, title: str) -> None:
    """Of what packed a loader's batch, and what it would be packed by here: dataclasses. Rates are
    not compared, as attention plans again where they differ.

    Raises:
        ValueError: they differ, so the batch is for other ranks, or for other attention.
    """
    names = [f.name for f in fields(asked) if f.name != "costs"]
    differ = [name for name in names if getattr(packed_by, name) != getattr(asked, name)]
    if differ:
        packed, given = (
            ", ".join(f"{name}={getattr(pack, name)!r}" for name in differ)
            for pack in (packed_by, asked)
        )
        raise ValueError(
            f"{title}: {type(asked).__name__} packed the loader's batches with {packed}, but "
            f"{title} was given {given}; give both the same"
        )


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
