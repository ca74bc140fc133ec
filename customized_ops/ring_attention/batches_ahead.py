"""Batches made ahead of time: in a thread here, or in a loader's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, TypeVar

from .core.cost import CostModel
from .op.arguments import is_integer, require

Given = TypeVar("Given")
Made = TypeVar("Made")


def require_same(packed_by: Any, asked: Any, title: str) -> None:
    """Check that a loader's batch was packed by what would pack it here; both are dataclasses.
    Rates are not compared, because attention plans again where they differ.

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


def require_planned_for(title: str, pack: Any) -> None:
    """Check what planning ahead needs of ``pack``: its ``ranks``, ``rank``, ``costs``, ``head_dim``
    and ``itemsize``.

    Raises:
        ArgumentError: one of them does not fit.
    """
    ranks, rank, costs = pack.ranks, pack.rank, pack.costs
    require(is_integer(ranks, 1), title, "ranks", "a number of ranks, 1 or more", ranks)
    require(is_integer(rank) and rank < ranks, title, "rank", f"0 to {ranks - 1}", rank)
    what = "a CostModel, such as group_costs(process_group)"
    require(isinstance(costs, CostModel), title, "costs", what, costs)
    topology = costs.topology
    fits = topology is None or topology.size == ranks
    require(fits, title, "costs", f"of the hosts of {ranks} ranks", str(topology))
    for name in ("head_dim", "itemsize"):
        value = getattr(pack, name)
        require(is_integer(value, 1), title, name, "1 or more", value)


def made_ahead(
    source: Iterable[Given], make: Callable[[Given], Made], count: int, name: str
) -> Iterator[Made]:
    """``make(item)`` for each item of ``source``. A thread makes ``count`` of them in advance; it
    ends with the iterator.

    Raises:
        ArgumentError: ``count`` is not a positive integer, or ``source`` cannot be iterated over.
            What ``source`` or ``make`` raises is raised where its value is due.
    """
    require(is_integer(count, 1), name, "ahead", "an integer of at least 1", count)
    fits = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    require(fits, name, "loader", "a DataLoader, or other batches to iterate over", source)
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
