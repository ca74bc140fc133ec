"""P ranks as P threads of one process: thousands of distributed cases in seconds, no spawn.

    run_ranks(4, lambda comm: attention(..., process_group=comm))   ->   [result of rank 0, ...]

The ranks run the same executor as real ones; only how a buffer reaches its peer differs. When one
rank fails the others are stopped and its exception is raised, so a test never hangs.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from .messages import Comm
from .patience import PeerFailed
from .rank_group import Messages, Reduction

T = TypeVar("T")

# A wait longer than this means that ranks disagree on what to send.
TIMEOUT_SECONDS = 60.0

_worlds: dict[str, World] = {}
_numbers = itertools.count()


class World:
    """What the ranks of one :func:`run_ranks` share."""

    def __init__(self, size: int) -> None:
        self.name, self.size = f"inprocess:{next(_numbers)}", size
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], Tensor] = {}  # sender, receiver, sequence number
        self.gathered: dict[tuple[int, int], Any] = {}  # sequence number, rank
        self.failed = False
        self.ended: set[int] = set()  # ranks whose function has returned
        self.asked: set[str] = set()
        self.local = threading.local()

    def wait_for(self, missing: Callable[[], list[int]], here: str) -> None:
        """Block until no rank is missing; raises if one failed meanwhile, or does not come."""
        over = lambda: self.failed or not (late := missing()) or self.ended & {*late}  # noqa: E731
        with self.changed:
            done = self.changed.wait_for(over, TIMEOUT_SECONDS)
            if late := missing():
                problem = f"has waited {TIMEOUT_SECONDS:g} s for a rank that has not come"
                if done and (gone := sorted(self.ended & {*late})):
                    problem = f"cannot go on: rank {gone[0]} has returned without this call"
                elif done:
                    problem = "cannot go on: a peer failed"
                raise PeerFailed(f"{here} {problem}")


class InProcessComm(Comm):
    """One thread's side of a :class:`World`."""

    two_streams = False  # threads share them, and a message carries no event to wait for
    compares = True

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world.name, rank, world.size)
        self._world = world
        self._sent: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._received: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._gathers = itertools.count()

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        # Messages are matched by count, as gloo and NCCL match them.
        world = self._world
        with world.changed:
            for peer, messages in send.items():
                for message in messages:
                    world.mail[self.rank, peer, next(self._sent[peer])] = message
            world.changed.notify_all()
        expected = [
            ((peer, self.rank, next(self._received[peer])), buffer)
            for peer, buffers in receive.items()
            for buffer in buffers
        ]

        def finish() -> None:
            for key, buffer in expected:
                missing = lambda key=key: [] if key in world.mail else [key[0]]  # noqa: E731
                world.wait_for(missing, self._here())
                buffer.copy_(world.mail.pop(key))

        return finish

    def _here(self) -> str:
        return f"{self.now or 'between calls'}: rank {self.rank} of {self.size}"

    def all_gather_object(self, value: Any) -> list[Any]:
        world, number = self._world, next(self._gathers)
        with world.changed:
            world.gathered[number, self.rank] = value
            world.changed.notify_all()
        ranks, gathered = range(self.size), world.gathered
        world.wait_for(lambda: [n for n in ranks if (number, n) not in gathered], self._here())
        return [gathered[number, n] for n in ranks]

    @contextmanager
    def beside(self) -> Iterator[Comm]:
        world = self.all_gather_object(World(self.size))[0]
        yield InProcessComm(world, self.rank)

    def give_up(self, error: BaseException) -> None:
        with self._world.changed:
            self._world.failed = True
            self._world.changed.notify_all()

    def is_first(self, what: str) -> bool:
        with self._world.changed:
            before = len(self._world.asked)
            self._world.asked.add(what)
            return len(self._world.asked) > before

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        # In rank order, so every rank gets the same bits.
        parts = self.all_gather_object(tensor.clone())
        both = torch.add if how == "sum" else torch.maximum
        tensor.copy_(functools.reduce(both, parts))


def this_thread(name: str) -> Comm:
    """The calling thread's side of the world called ``name``."""
    if name not in _worlds:
        problem = f"the in-process ranks {name!r} have ended; a graph outlived its run_ranks"
        raise ValueError(problem)
    return _worlds[name].local.comm


def run_ranks(size: int, function: Callable[[Comm], T]) -> list[T]:
    """Run ``function(comm)`` on ``size`` ranks at once; returns their results in rank order.

    Raises:
        Whatever the lowest-numbered failing rank raised.
        ValueError: there is no rank.
    """
    if size < 1:
        raise ValueError(f"run_ranks: size must be 1 or more, got {size}")
    world = World(size)
    _worlds[world.name] = world
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        world.local.comm = InProcessComm(world, rank)
        try:
            results[rank] = function(world.local.comm)
        except BaseException as error:
            errors[rank] = error
            world.failed = True
        else:
            world.ended.add(rank)
        with world.changed:
            world.changed.notify_all()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del _worlds[world.name]
    if errors:
        causes = [e for _, e in sorted(errors.items()) if not isinstance(e, PeerFailed)]
        raise causes[0] if causes else next(iter(errors.values()))
    pairs = ", ".join(f"{of} to {to}" for of, to in sorted({key[:2] for key in world.mail}))
    left_out = "a rank left out a call, or its backward"
    assert world.failed or not pairs, f"messages from rank {pairs} were never received: {left_out}"
    return results
