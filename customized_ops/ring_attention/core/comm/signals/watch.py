"""The host's side of a GPU's waits for its peers.

Kernels that wait tell of a long wait in a record of the host's memory. A thread reads it each
second, which costs neither the GPU nor the step anything. It names who is missing, as waits on CPUs
do (:mod:`..patience`), and tells the kernel to stop where there is nothing more to wait for.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..patience import LOOK_SECONDS, Patience, PeerFailed
from .fingerprint import NO_CALL, differing
from .record import (
    CALL,
    DIFFERS,
    ENDED,
    NOTHING,
    PEER,
    RECORD_LENGTH,
    STATUS,
    STOP,
    THEIRS,
    WAITS,
)

MOST_KNOWN = 256  # passes whose names are kept
OF_TIMEOUT = 0.9  # the part of the group's timeout after which a rank waits no more


class Watch:
    """Of one rank; ``record``: int64[RECORD_LENGTH], see :mod:`.record`.

    Attributes:
        begun: how many passes have begun whose end the record counts.
        problem: what has ended the waits of the rank's GPU; None while all is well.
    """

    def __init__(
        self, patience: Patience, record: npt.NDArray[np.int64], timeout_seconds: float
    ) -> None:
        assert len(record) == RECORD_LENGTH
        self._patience, self._record = patience, record
        self._most_seconds = OF_TIMEOUT * timeout_seconds
        self._names: dict[int, str] = {}
        self._now, self._ended = "a pass", 0
        self.begun = 0
        self.problem: str | None = None
        threading.Thread(target=_look_on, args=(weakref.ref(self),), daemon=True).start()

    def name(self, call: int, what: str) -> None:
        """``what`` is the pass with the fingerprint ``call``, for errors."""
        if len(self._names) < MOST_KNOWN:
            self._names[call] = what

    def check(self, what: str) -> None:
        """``what`` is next.

        Raises:
            PeerFailed: a wait of the GPU has ended in an error.
        """
        self._now = what
        if self.problem is None and self._record[STATUS] == DIFFERS:
            self.look()
        if self.problem is not None:
            raise PeerFailed(self.problem)

    def look(self) -> None:
        """Read what the GPU tells; blocks while it waits."""
        status, peer, call, theirs = (int(self._record[n]) for n in (STATUS, PEER, CALL, THEIRS))
        doing = self._names.get(call, self._now)
        if status == DIFFERS:
            self._end(self._patience.here(doing) + disagreement(peer, call, theirs))
        elif status == WAITS:
            self._wait(doing, lambda: self._record[STATUS] != WAITS)
        elif self._record[ENDED] < self.begun and self._record[ENDED] == self._ended:
            self._wait(self._now, lambda: self._record[ENDED] != self._ended)
        self._ended = int(self._record[ENDED])

    def _wait(self, doing: str, is_over: Callable[[], bool]) -> None:
        """Look after a wait that has taken a second; end it where it is in vain."""

        def within(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while not (over := is_over()) and time.monotonic() < end:
                time.sleep(seconds / 20)
            return over

        try:
            self._patience.until(within, doing, self._most_seconds)
        except PeerFailed as failure:
            self._record[STOP] = 1
            self._end(str(failure))

    def _end(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            self._record[STATUS] = NOTHING
            warnings.warn(f"{problem} (CUDA reports this as a launch failure)", stacklevel=2)


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
