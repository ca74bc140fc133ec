"""Waiting for peers: a rank that fails or dies ends its peers' waits, and one that does not come is
named. What a GPU waits for is looked at by the same rules (:mod:`.signals.watch`).

A wait of gloo ends by data, by a closed connection or by the group's timeout; nothing else wakes
it. So a thread does the waiting, and the rank itself looks into the group's store each second:

- A rank that fails inside a pass writes down what happened. Peers that wait raise that.
- A rank that has waited for long writes down what it waits in. Of the others, those that have
  written nothing have not come, and it warns of them. Where one has written another fingerprint of
  the same pass, both raise.

Nothing is written while all goes well.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .signals.fingerprint import disagreement

LOOK_SECONDS = 1.0  # between two looks at what peers have written
PATIENCE = "SEQSHARD_PATIENCE"  # the environment variable; in seconds
PATIENCE_SECONDS = 30.0  # a longer wait is told of

OF_NO_STEP = -1  # what is written down of a failure that was found outside of any

Job = Callable[[], None]
Passes = Mapping[int, int]  # by number, counted alike by all ranks, the fingerprint of each


class PeerFailed(RuntimeError):
    """Another rank of the group failed, so this one cannot go on. The group is of no use any more:
    ranks are at different steps."""


class Patience:
    """One rank's waits for its group. ``step`` counts what ranks do together."""

    def __init__(
        self, group: dist.ProcessGroup, processes: Mapping[int, int] | None = None
    ) -> None:
        """``processes``: ids of those of peers on this host, by rank; where they end is seen."""
        self._store = _get_process_group_store(group)
        self._processes = processes or {}
        self._rank, self._ranks = group.rank(), dist.get_process_group_ranks(group)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed: set[int] = set()  # the steps in which this rank failed

    @classmethod
    def of_gpus(cls, group: dist.ProcessGroup) -> Patience:
        """Of a group of which no connection says that a process has ended; all ranks call this
        together."""
        said: list[Any] = [None] * group.size()
        dist.all_gather_object(said, this_process(), group=group)
        return cls(group, processes_of(said))

    def wait(self, doing: str, function: Job, device: torch.device | None = None) -> None:
        """``function()``, which waits for peers; ``device``: the GPU that it uses, if any.

        Raises:
            PeerFailed: a peer failed in a step in which this rank did not, or its process is gone.
        """
        errors: list[BaseException] = []
        done = threading.Event()

        def job() -> None:
            try:
                with nullcontext() if device is None else torch.cuda.device(device):
                    function()
            except BaseException as error:
                errors.append(error)
            done.set()

        self._run(job)
        self.until(done.wait, doing)
        if errors:
            self.fail(doing, errors[0])

    def fail(self, doing: str, error: BaseException) -> NoReturn:
        """Raise for what a message or a wait for one ended with; see :meth:`wait`."""
        if not isinstance(error, RuntimeError):
            raise error
        # A closed connection or the group's timeout. Why it closed may have been written down.
        self._raise_if_a_peer_failed(doing)
        cause = str(error).partition("\n")[0]
        raise PeerFailed(f"{self.here(doing)} lost a peer: {cause}") from error

    def until(
        self,
        over: Callable[[float], bool],
        doing: str,
        most_seconds: float = math.inf,
        awaited: Callable[[], Iterable[int]] = tuple,
        passes: Passes = MappingProxyType({}),
    ) -> None:
        """Wait, and look what peers have written meanwhile.

        Args:
            over: whether the wait ends within so many seconds.
            most_seconds: that the wait may take.
            awaited: peers whose processes must not have ended.
            passes: the last ones of this rank. A peer that waits for long, too, says its own.
        Raises:
            PeerFailed: as :meth:`wait`, or it took longer, or a peer's passes are others.
        """
        seconds, patience = 0.0, float(os.environ.get(PATIENCE, PATIENCE_SECONDS))
        patience = min(patience, most_seconds / 2)
        asked = warned = False
        while not over(LOOK_SECONDS):
            seconds += LOOK_SECONDS
            self._raise_if_a_peer_failed(doing)
            self._raise_if_one_has_ended(doing, awaited())
            if seconds >= most_seconds:
                raise PeerFailed(f"{self._waited(doing, seconds)}, as long as it may")
            if asked and not warned and seconds >= patience + 2 * LOOK_SECONDS:
                # Peers have had time to write, too.
                tell(self._waited(doing, seconds))
                warned = True
            elif not asked and seconds >= patience:
                self._store.set(f"waits/{self._rank}", _waits_text(doing, passes))
                asked = True
            if asked:
                self._raise_if_one_has_others(doing, passes)
        if asked:
            self._store.delete_key(f"waits/{self._rank}")

    def tell_failure(self, doing: str, step: int, error: BaseException) -> None:
        """Write down, for peers, that this rank's step ended with ``error``."""
        if isinstance(error, PeerFailed) and error.__cause__ is None:
            return  # peers have read the same
        self._failed.add(step)
        text = f"{step} {doing}: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store may be gone with the rank that keeps it
            self._store.set(f"failed/{self._rank}", text)

    def tell_problem(self, problem: str) -> None:
        """Write down, for peers, what this rank alone has found."""
        with suppress(RuntimeError):
            self._store.set(f"failed/{self._rank}", f"{OF_NO_STEP} {problem}")

    def leave(self) -> None:
        """The program is done: peers do not take its end for a failure."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")

    def still_here(self) -> list[int]:
        """Peers whose programs are not done, or have failed."""
        with suppress(RuntimeError):
            left = self._written("left")
            return [r for r in range(len(self._ranks)) if r != self._rank and r not in left]
        return []

    def here(self, doing: str) -> str:
        """The start of an error."""
        return f"{doing}: rank {self._rank} of the group of ranks {self._ranks}"

    def _run(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _written(self, what: str) -> dict[int, str]:
        """What peers have written."""
        keys = {rank: f"{what}/{rank}" for rank in range(len(self._ranks)) if rank != self._rank}
        return {r: self._store.get(k).decode() for r, k in keys.items() if self._store.check([k])}

    def _raise_if_a_peer_failed(self, doing: str) -> None:
        try:
            failed = self._written("failed")
        except RuntimeError as error:
            problem = "lost the group's store, which one of its ranks keeps (usually the first)"
            raise PeerFailed(f"{self.here(doing)} {problem}") from error
        for rank, text in failed.items():
            step, _, what = text.partition(" ")
            if int(step) not in self._failed:
                raise PeerFailed(f"{self.here(doing)} cannot go on: rank {rank} failed in {what}")

    def _raise_if_one_has_ended(self, doing: str, awaited: Iterable[int]) -> None:
        known = [rank for rank in awaited if rank in self._processes]
        if gone := [str(rank) for rank in known if _has_ended(self._processes[rank])]:
            raise PeerFailed(f"{self.here(doing)} lost rank {', '.join(gone)}: its process ended")

    def _raise_if_one_has_others(self, doing: str, passes: Passes) -> None:
        for rank, text in self._written("waits").items() if passes else ():
            _, theirs = _read_waits(text)
            for number in sorted(passes.keys() & theirs.keys()):
                if passes[number] != theirs[number]:
                    problem = disagreement(rank, passes[number], theirs[number])
                    raise PeerFailed(self.here(doing) + problem)

    def _waited(self, doing: str, seconds: float) -> str:
        """Which ranks do not wait as this one does."""
        waits = {rank: _read_waits(text)[0] for rank, text in self._written("waits").items()}
        found = [
            f"rank {rank} has not come"
            if rank not in waits
            else f"rank {rank} waits in {waits[rank]}"
            for rank in range(len(self._ranks))
            if rank != self._rank and waits.get(rank) != doing
        ]
        who = "; ".join(found) or "all ranks wait here for a message"
        return f"{self.here(doing)} has waited {seconds:.0f} s: {who}"


def _waits_text(doing: str, passes: Passes) -> str:
    """What a rank that has waited for long writes."""
    return json.dumps([doing, list(passes.items())])


def _read_waits(text: str) -> tuple[str, dict[int, int]]:
    doing, passes = json.loads(text)
    return doing, dict(passes)


def tell(text: str) -> None:
    """Warn; where warnings are errors, a thread that looks after a wait must still go on."""
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        print(text, file=sys.stderr)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """In seconds: the world's, where that is longer than what a group is made with by default."""
    timeouts: list[timedelta] = []
    for each in (group, dist.group.WORLD):
        with suppress(RuntimeError):  # the world has no backend for the device
            timeouts.append(each._get_backend(device).options._timeout)  # type: ignore[union-attr]
    return max(timeouts).total_seconds()


def processes_of(peers: Sequence[tuple[int, int] | None]) -> dict[int, int]:
    """Of what ranks say of themselves by :func:`this_process`, the ids of processes whose end this
    one can see."""
    here = this_process()
    if here is None:
        return {}
    same = {rank: each[0] for rank, each in enumerate(peers) if each and each[1] == here[1]}
    return {rank: process for rank, process in same.items() if not _has_ended(process)}


def this_process() -> tuple[int, int] | None:
    """Its id, and the namespace of processes that this is one of; None where that is not known."""
    try:
        return os.getpid(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _has_ended(process: int) -> bool:
    try:
        _, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return True
    return rest.split()[0] in "ZX"  # it is kept until its parent has asked for it


def _serve(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        jobs.get()()
