"""A thread that does the waiting of one rank, so that the rank itself can watch over it."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable

LEAVE_SECONDS = 5.0  # how long a process, at its end, waits for waits that were given up

Job = Callable[[], None]
Jobs = queue.SimpleQueue[Job | None]  # None: there are no more

_running: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


class WaitingThread:
    """Does jobs in order, on a thread that starts with the first of them."""

    def __init__(self) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, job: Job) -> None:
        """Run ``job()``, which raises nothing, after the jobs before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            _running[self._thread] = self._jobs
            weakref.finalize(self, self._jobs.put, None).atexit = False
            self._thread.start()
        self._jobs.put(job)


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # which may keep a process group alive


@atexit.register
def finish() -> bool:
    """Ends the threads before Python does: one that returns from gloo while Python ends aborts the
    process. A wait that was given up ends as soon as its peers do. A forked child has no such
    threads. Whether all of them have ended."""
    end = time.monotonic() + LEAVE_SECONDS
    threads = list(_running.items())
    for thread, jobs in threads:
        jobs.put(None)
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread, _ in threads)
