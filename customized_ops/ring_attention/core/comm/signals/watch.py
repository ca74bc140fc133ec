"""The host's side of a GPU's waits for its peers.

Kernels report a long wait in a record in the host's memory. A thread reads it each second, which
costs neither the GPU nor the step anything. The thread names who is missing, as waits on CPUs do
(:mod:`..patience`), and tells the kernel to stop where there is nothing more to wait for.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from annotations.waiting import tell

from ..patience import LOOK_SECONDS, Patience, PeerFailed
from . import record as of
from .fingerprint import disagreement

MOST_KNOWN = 256  # passes whose names are kept
MOST_AHEAD = 4096  # how many passes a host may be ahead of its GPU and know their fingerprints
STOP_SECONDS = 60.0  # within which a GPU that was told to stop must do so
NEAR = 8  # passes on either side of the one that waits that are compared with those of a peer
_all: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """Watches what the GPU of one rank waits for.

    Attributes:
        problem: what has ended the waits of the rank's GPU; None while all is well.
    """

    def __init__(
        self,
        patience: Patience,
        record: npt.NDArray[np.int64],
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            record: int64[record_length(ranks)], see :mod:`.record`.
            stop: ends waits of kernels that do not read the record.
        """
        self._patience, self._record = patience, record
        self._slots = record[of.SLOTS :].reshape(-1, of.SLOT_LENGTH)
        self._names: dict[int, str] = {}
        self._stop = stop
        self._now, self._ended = "a pass", 0
        self._begun, self._passes = 0, deque[tuple[int, int]](maxlen=MOST_AHEAD)
        self._process = os.getpid()
        self.problem: str | None = None
        self._has_stopped = False
        _all.add(self)
        threading.Thread(target=_look_on, args=(weakref.ref(self),), daemon=True).start()

    def name(self, call: int, what: str) -> None:
        """In errors, the pass with the fingerprint ``call`` is called ``what``."""
        if call not in self._names and len(self._names) >= MOST_KNOWN:
            self._names.pop(next(iter(self._names)))
        self._names[call] = what

    def check(self, what: str) -> None:
        """Called before ``what``.

        Raises:
            PeerFailed: a wait of the GPU has ended in an error, as :meth:`look` has found.
        """
        self._now = what
        if self.problem is not None:
            raise PeerFailed(self.problem)

    def begin(self, call: int) -> int:
        """A pass begins, whose end will be counted in the record. Returns its number."""
        self._begun += 1
        self._passes.append((self._begun, call))
        return self._begun

    def forget(self) -> None:
        """The pass that began last will not end."""
        self._begun -= 1
        self._passes.pop()

    def compare(self) -> None:
        """See whether a peer was found in another pass."""
        if self.problem is None and (peers := self._peers(of.DIFFERS)):
            call, theirs = map(int, self._slots[peers[0], [of.CALL, of.THEIRS]])
            here = self._patience.here(self._name_of(call))
            problem = here + disagreement(peers[0], call, theirs)
            self._patience.tell_problem(problem)  # the peer may be ahead, and miss it
            self._end(problem)

    def look(self) -> None:
        """Read what the GPU tells; blocks while it waits."""
        self.compare()
        ended = int(self._record[of.ENDED])
        if peers := self._peers(of.WAITS):
            doing = self._name_of(int(self._slots[peers[0], of.CALL]))
            is_over = lambda: not self._peers(of.WAITS) or bool(self._peers(of.DIFFERS))  # noqa: E731
            self._wait(doing, is_over, lambda: self._peers(of.WAITS))
        elif ended < self._begun and ended == self._ended:
            told, passes = self._slots[:, of.STATUS], self._passes_near(ended)
            doing = self._name_of(passes[ended + 1]) if ended + 1 in passes else self._now
            is_over = lambda: self._record[of.ENDED] != ended or bool(told.any())  # noqa: E731
            self._wait(doing, is_over, lambda: self._patience.not_left_after(ended + 1))
        self._ended = ended

    def _peers(self, status: int) -> list[int]:
        found: list[int] = (self._slots[:, of.STATUS] == status).nonzero()[0].tolist()
        return found

    def _name_of(self, call: int) -> str:
        return self._names.get(call, self._now)

    def _wait(
        self, doing: str, is_over: Callable[[], bool], awaited: Callable[[], Iterable[int]]
    ) -> None:
        """Watch over a wait that has taken a second; end it where it is in vain."""

        def within(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not (over := is_over()) and time.monotonic() < end:
                time.sleep(seconds / 20)
            return over

        try:
            passes = self._passes_near(int(self._record[of.ENDED]))
            self._patience.until(within, doing, awaited, passes, "gpu")
        except RuntimeError as failure:  # PeerFailed, or an error of the store
            self._end(str(failure))

    def _passes_near(self, ended: int) -> dict[int, int]:
        """Fingerprints, by number, of passes that have begun, near the number ``ended``."""
        return {n: call for n, call in list(self._passes) if abs(n - ended) <= NEAR}

    def _end(self, problem: str) -> None:
        """Report it, and then stop what waits: the device's error may end the process at once."""
        if self.problem is None:
            self.problem = problem
            try:
                tell(f"{problem} (CUDA reports this as a launch failure)")
            finally:
                self._limit_stop()
                self._record[of.STOP] = 1
                self._stop()

    def _limit_stop(self) -> None:
        if self._patience.device is not None:
            limit = threading.Timer(STOP_SECONDS, self._end_process_if_at_work)
            limit.daemon = True
            with suppress(RuntimeError):  # Python is ending, and starts no threads
                limit.start()

    def require_stop(self) -> None:
        """Wait for the GPU, which was told to stop and so ends in an error. If it does not, or if
        the stop or this wait never ends, only the timer of STOP_SECONDS ends the process."""
        with suppress(RuntimeError):  # that error
            while self._patience.device is not None and self._is_at_work():
                torch.cuda.current_stream(self._patience.device).synchronize()  # releases the GIL
                time.sleep(LOOK_SECONDS)
        self._has_stopped = True

    def _is_at_work(self) -> bool:
        told = self._slots[:, of.STATUS] != of.NOTHING
        return bool(told.any()) or int(self._record[of.ENDED]) < self._begun

    def _end_process_if_at_work(self) -> None:
        if self._has_stopped:
            return
        text = f"{self.problem}; its GPU goes on {STOP_SECONDS:.0f} s later, so the process ends\n"
        with suppress(OSError):  # warnings may be off, and their hooks be stuck
            os.write(2, text.encode())
        os.abort()

    def at_exit(self) -> None:
        """Called as the program ends."""
        if os.getpid() != self._process:
            return  # it was forked from the Watch's process
        self._stop = lambda: None  # it is over anyway
        self.compare()  # a synchronisation's error may end it before the thread has looked
        if self.problem is None and self._begun and not hasattr(sys, "last_value"):
            self._patience.leave(self._begun)


def require_alike(sizes: Sequence[int]) -> None:
    """Check the sizes, in bytes, of the memory that ranks are to make together.

    Raises:
        PeerFailed: they differ, so ranks are not in the same pass.
    """
    if len(set(sizes)) > 1:
        of_ranks = ", ".join(f"rank {rank} {size}" for rank, size in enumerate(sizes))
        raise PeerFailed(
            f"ranks do not agree on what they exchange, as its memory shows, in bytes: {of_ranks}"
        )


def require_room(failures: Sequence[str]) -> None:
    """Check the errors that ranks met, each when it made its part of that memory; "" is none.

    Raises:
        PeerFailed: a rank has no memory.
    """
    for rank, failure in enumerate(failures):
        if failure:
            raise PeerFailed(f"rank {rank} has no memory for what ranks exchange: {failure}")


def _look_on(reference: weakref.ref[Watch]) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        watch = reference()
        if watch is None:
            return
        if watch.problem is not None:
            return watch.require_stop()
        watch.look()
        del watch


@atexit.register
def _at_exit() -> None:
    for watch in list(_all):
        watch.at_exit()
