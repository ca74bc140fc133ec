"""The host's side of a GPU's waits for its peers.

Kernels that wait tell of a long wait in a record of the host's memory. A thread reads it each
second, which costs neither the GPU nor the step anything. It names who is missing, as waits on CPUs
do (:mod:`..patience`), and tells the kernel to stop where there is nothing more to wait for.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..patience import LOOK_SECONDS, Patience, PeerFailed, tell
from . import record as of
from .fingerprint import NO_CALL, differing

MOST_KNOWN = 256  # passes whose names are kept
OF_TIMEOUT = 0.9  # the part of the group's timeout after which a rank waits no more
_all: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """Of one rank; ``record``: int64[record_length(ranks)], see :mod:`.record`.

    Attributes:
        begun: how many passes have begun whose end the record counts.
        problem: what has ended the waits of the rank's GPU; None while all is well.
    """

    def __init__(
        self, patience: Patience, record: npt.NDArray[np.int64], timeout_seconds: float
    ) -> None:
        self._patience, self._record = patience, record
        self._slots = record[of.SLOTS :].reshape(-1, of.SLOT_LENGTH)
        self._most_seconds = OF_TIMEOUT * timeout_seconds
        self._names: dict[int, str] = {}
        self._now, self._ended = "a pass", 0
        self.begun = 0
        self.problem: str | None = None
        _all.add(self)
        threading.Thread(target=_look_on, args=(weakref.ref(self),), daemon=True).start()

    def name(self, call: int, what: str) -> None:
        """``what`` is the pass with the fingerprint ``call``, for errors."""
        if call not in self._names and len(self._names) >= MOST_KNOWN:
            self._names.pop(next(iter(self._names)))
        self._names[call] = what

    def check(self, what: str) -> None:
        """``what`` is next.

        Raises:
            PeerFailed: a wait of the GPU has ended in an error, as :meth:`look` has found.
        """
        self._now = what
        if self.problem is not None:
            raise PeerFailed(self.problem)

    def compare(self) -> None:
        """See whether a peer was found in another pass."""
        if self.problem is None and (peers := self._peers(of.DIFFERS)):
            call, theirs = map(int, self._slots[peers[0], [of.CALL, of.THEIRS]])
            self._end(
                self._patience.here(self._name_of(call)) + disagreement(peers[0], call, theirs)
            )

    def look(self) -> None:
        """Read what the GPU tells; blocks while it waits."""
        self.compare()
        ended = int(self._record[of.ENDED])
        if peers := self._peers(of.WAITS):
            doing = self._name_of(int(self._slots[peers[0], of.CALL]))
            self._wait(doing, lambda: not self._peers(of.WAITS) or bool(self._peers(of.DIFFERS)))
        elif ended < self.begun and ended == self._ended:
            told = self._slots[:, of.STATUS]
            self._wait(self._now, lambda: self._record[of.ENDED] != ended or bool(told.any()))
        self._ended = ended

    def _peers(self, status: int) -> list[int]:
        found: list[int] = (self._slots[:, of.STATUS] == status).nonzero()[0].tolist()
        return found

    def _name_of(self, call: int) -> str:
        return self._names.get(call, self._now)

    def _wait(self, doing: str, is_over: Callable[[], bool]) -> None:
        """Look after a wait that has taken a second; end it where it is in vain."""

        def within(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not (over := is_over()) and time.monotonic() < end:
                time.sleep(seconds / 20)
            return over

        try:
            self._patience.until(within, doing, self._most_seconds, lambda: self._peers(of.WAITS))
        except PeerFailed as failure:
            self._record[of.STOP] = 1
            self._end(str(failure))

    def _end(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            tell(f"{problem} (CUDA reports this as a launch failure)")


def disagreement(peer: int, call: int, theirs: int) -> str:
    """What is wrong where a peer is in another pass."""
    if NO_CALL in (call, theirs):
        return f" and rank {peer} do not make the same calls in the same order"
    return f" and rank {peer} do not agree on " + " and ".join(differing(call, theirs))


def require_alike(sizes: Sequence[int]) -> None:
    """Of the memory that ranks are to make together, in bytes.

    Raises:
        PeerFailed: they differ, so ranks are not in the same pass.
    """
    if len(set(sizes)) > 1:
        of_ranks = ", ".join(f"rank {rank} {size}" for rank, size in enumerate(sizes))
        raise PeerFailed(
            f"ranks do not agree on what they exchange, as its memory shows, in bytes: {of_ranks}"
        )


def _look_on(reference: weakref.ref[Watch]) -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        watch = reference()
        if watch is None or watch.problem is not None:
            return
        watch.look()
        del watch


@atexit.register
def _at_exit() -> None:
    """The error of a synchronisation may end the process before the thread has looked."""
    for watch in list(_all):
        watch.compare()
