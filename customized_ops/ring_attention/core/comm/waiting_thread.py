"""A thread that does the waiting of one rank, so that the rank itself can look after it."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

LEAVE_SECONDS = 5.0  # that a process waits at its end for a wait that was given up

Job = Callable[[], None]


class WaitingThread:
    """Does jobs in order; it starts with the first of them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, job: Job) -> None:
        """``job()``, which raises nothing, after those before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            self._thread.start()
            atexit.register(_finish, self._jobs)
        self._jobs.put(job)


def _serve(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        jobs.get()()


def _finish(jobs: queue.SimpleQueue[Job]) -> None:
    """Before Python ends: a thread that comes back from gloo while it does so aborts the process. A
    wait that was given up ends as soon as its peers do."""
    over = threading.Event()
    jobs.put(over.set)
    over.wait(LEAVE_SECONDS)
