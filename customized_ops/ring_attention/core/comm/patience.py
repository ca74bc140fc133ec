"""Waiting for peers: a rank that fails or dies ends its peers' waits, and one that does not come is
named. The same rules apply to what a GPU waits for (:mod:`.signals.watch`).

A gloo wait ends with data, with a closed connection or with the group's timeout; nothing else wakes
it. An NCCL wait does not even end when a peer's process does. So a thread does the waiting, and the
rank itself looks into the group's store each second:

- A rank that fails inside a pass writes down what happened. Peers that wait raise an error with it.
- A rank that has waited for long writes down what it waits in. Ranks that have written nothing have
  not come, and it warns of them. Two ranks raise if they have written different fingerprints for
  the same pass, or if no rank is missing and the two were doing different things when all met.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from annotations import waiting
from annotations.groups import timeout_of

from .links.host_names import has_ended
from .notes import FAILED, LEFT, PROCESS, WAITS, Meetings, Notes, Passes, waits_text
from .signals.fingerprint import disagreement, other_meeting
from .waiting_thread import Job, WaitingThread

LOOK_SECONDS = 1.0  # between two looks at what peers have written
LOOKS_AT_AN_END = 10  # looks in LOOK_SECONDS, where a connection has closed
OF_TIMEOUT = 0.9  # the part of the group's timeout after which a rank stops waiting

OF_NO_STEP = -1  # the step that is written down for a failure found outside of any step


class PeerFailed(RuntimeError):
    """Another rank of the group failed, so this one cannot go on. The group is of no use any more,
    because its ranks are at different steps."""


class Patience:
    """One rank's waits for its group, each of at most ``most_seconds``. Its host waits in the last
    of ``meetings``, its GPU in any of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """``device``: the rank's, in a group of GPUs. There, no connection tells that a process has
        ended."""
        self.most_seconds, self.device = OF_TIMEOUT * timeout_of(group, device), device
        self._notes = Notes(group)
        self._processes: dict[int, str] | None = None  # names of those of peers, as far as known
        self._thread = WaitingThread()
        self.meetings: Meetings = MappingProxyType({})
        self._failed: set[int] = set()  # the steps in which this rank failed
        # What was written: the last of these failures, and what this rank alone has found. A later
        # failure follows from what it has found, so it is not written.
        self._told: list[tuple[int, str]] = []
        self._telling = threading.Lock()  # the thread that watches a GPU writes, too

    def wait(self, doing: str, function: Job) -> None:
        """Run ``function()``, which waits for peers, on the waiting thread.

        Raises:
            PeerFailed: a peer failed in a step in which this rank did not, or its process is gone,
                or it does not come.
        """
        device = self.device
        errors: list[BaseException] = []
        done = threading.Event()

        def job() -> None:
            try:
                with nullcontext() if device is None else torch.cuda.device(device):
                    function()
            except BaseException as error:
                errors.append(error)
            done.set()

        self._thread.do(job)
        awaited = tuple if device is None else self.all_peers
        self.until(done.wait, doing, awaited)
        if errors:
            self.fail(doing, errors[0])
        if self._processes is None:
            self._learn_names()  # while the rank that keeps the store is there

    def fail(self, doing: str, error: BaseException) -> NoReturn:
        """Raise for the error in which a message, or a wait for one, ended; see :meth:`wait`."""
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            raise error
        # A closed connection or the group's timeout. Why a connection closed may be seen soon: it
        # closes before its process has ended.
        of_nccl = isinstance(error, dist.DistBackendError)  # whose text has several lines
        cause = str(error) if of_nccl else str(error).partition("\n")[0]
        for _ in range(LOOKS_AT_AN_END):
            has_store = self._raise_if_a_peer_failed(doing)
            self._raise_if_one_has_ended(doing, self.all_peers, error)
            time.sleep(LOOK_SECONDS / LOOKS_AT_AN_END)
        if not has_store:
            raise self._lost_store(doing) from error
        raise PeerFailed(f"{self.here(doing)} has no answer from a peer: {cause}") from error

    def until(
        self,
        over: Callable[[float], bool],
        doing: str,
        awaited: Callable[[], Iterable[int]] = tuple,
        passes: Passes = MappingProxyType({}),
        of: Literal["host", "gpu"] = "host",
    ) -> None:
        """Wait, and look at what peers write meanwhile.

        Args:
            over: whether the wait ends within so many seconds.
            awaited: returns peers whose processes must not have ended; called once one has.
            passes: those around the one that waits. A peer that waits for long writes its own.
            of: whose wait it is. When the rank that keeps the group's store is done, a GPU may
                still wait for what is there already. So without the store, a GPU's wait may take
                twice the patience.
        Raises:
            PeerFailed: as :meth:`wait`, or it took ``most_seconds``, or a peer's passes differ.
        """
        seconds, patience = 0.0, min(waiting.patience(), self.most_seconds / 2)
        asked = warned = False
        while not over(LOOK_SECONDS):
            seconds += LOOK_SECONDS
            has_store = self._raise_if_a_peer_failed(doing)
            self._raise_if_one_has_ended(doing, awaited)
            if not has_store and of == "gpu" and seconds < 2 * patience:
                continue
            if not has_store:
                raise self._lost_store(doing)
            if seconds >= self.most_seconds:
                raise PeerFailed(f"{self._waited(doing, seconds)}; its group's timeout is near")
            if asked and not warned and seconds >= patience + 2 * LOOK_SECONDS:
                # Peers have had time to write, too.
                waiting.tell(self._waited(doing, seconds))
                warned = True
            elif not asked and seconds >= patience:
                meetings = self.meetings if of == "host" else {}
                self._notes.write(WAITS[of], waits_text(doing, passes, meetings))
                asked = True
            if asked:
                self._raise_if_one_is_elsewhere(doing, passes)
        if asked:
            self._notes.write(WAITS[of], "")

    def tell_failure(self, doing: str, step: int, error: BaseException) -> None:
        """Write down, for peers, that this rank's step ended with ``error``."""
        if isinstance(error, PeerFailed) and error.__cause__ is None:
            return  # peers have read the same
        self._failed.add(step)
        with self._telling:
            if not any(of_step == OF_NO_STEP for of_step, _ in self._told):
                self._told = [(step, f"{doing}: {type(error).__name__}: {error}")]
                self._notes.write(FAILED, json.dumps(self._told))

    def is_first(self, what: str) -> bool:
        """See :meth:`.RankGroup.is_first`."""
        return self._notes.is_first(what)

    def tell_problem(self, problem: str) -> None:
        """Write down, for peers, what this rank alone has found."""
        with self._telling:
            self._told.append((OF_NO_STEP, problem))
            self._notes.write(FAILED, json.dumps(self._told))

    def leave(self, passes: int) -> None:
        """Write down that the program is done after this many passes. To peers that wait for none
        beyond these, its end is then no failure."""
        self._notes.write(LEFT, str(passes))

    def all_peers(self) -> list[int]:
        """The ranks of all peers."""
        return self._notes.peers

    def not_left_after(self, passes: int) -> list[int]:
        """Peers that have not written that they are done after ``passes`` passes or more."""
        with suppress(RuntimeError):
            left = self._notes.written(LEFT)
            return [rank for rank in self.all_peers() if int(left.get(rank, 0)) < passes]
        return []

    def here(self, doing: str) -> str:
        """The start of an error."""
        return f"{doing}: rank {self._notes.rank} of the group of ranks {self._notes.ranks}"

    def _lost_store(self, doing: str) -> PeerFailed:
        problem = "lost the group's store, which one of its ranks keeps (usually the first)"
        return PeerFailed(f"{self.here(doing)} {problem}")

    def _raise_if_a_peer_failed(self, doing: str) -> bool:
        """Raise if a peer has written that it failed; returns whether the store can be read."""
        try:
            failed = self._notes.written(FAILED)
        except RuntimeError:
            return False
        for rank, text in failed.items():
            for what in (what for step, what in json.loads(text) if step not in self._failed):
                raise PeerFailed(f"{self.here(doing)} cannot go on: rank {rank} failed in {what}")
        return True

    def _raise_if_one_has_ended(
        self,
        doing: str,
        awaited: Callable[[], Iterable[int]],
        error: BaseException | None = None,
    ) -> None:
        known = self._processes or {}
        if len(known) < len(self.all_peers()) or any(map(has_ended, known.values())):
            known = self._learn_names()  # what was read may be of an earlier group of the same name
        gone = {rank for rank, process in known.items() if has_ended(process)}
        # A peer writes that it is done before it ends. So that note is read once the end is known.
        if gone and (lost := sorted(gone.intersection(awaited()))):
            problem = f"lost rank {', '.join(map(str, lost))}: its process ended"
            self.tell_problem(f"{self.here(doing)} {problem}")  # other hosts do not see this
            raise PeerFailed(f"{self.here(doing)} {problem}") from error

    def _learn_names(self) -> dict[int, str]:
        with suppress(RuntimeError):  # the store is gone
            self._processes = self._notes.written(PROCESS)
        return self._processes or {}

    def _raise_if_one_is_elsewhere(self, doing: str, passes: Passes) -> None:
        waits = self._notes.waits()
        all_wait = {rank for rank, _ in waits} == set(self.all_peers())
        for rank, (_, their_passes, their_meeting) in waits:
            for number, theirs in their_meeting.items() if all_wait else ():
                if problem := other_meeting(rank, self.meetings.get(number, theirs), theirs):
                    self.tell_problem(self.here(doing) + problem)  # the peer may be behind
                    raise PeerFailed(self.here(doing) + problem)
            for number in sorted(passes.keys() & their_passes.keys()):
                if passes[number] != their_passes[number]:
                    problem = disagreement(rank, passes[number], their_passes[number])
                    raise PeerFailed(self.here(doing) + problem)

    def _waited(self, doing: str, seconds: float) -> str:
        """How long this rank has waited, and which ranks wait elsewhere or have not come."""
        waits: dict[int, list[str]] = {rank: [] for rank in self.all_peers()}
        for rank, (what, _, _) in self._notes.waits():
            waits[rank].append(what)
        found = [
            f"rank {rank} waits in {theirs[0]}" if theirs else f"rank {rank} has not come"
            for rank, theirs in waits.items()
            if doing not in theirs
        ]
        who = "; ".join(found) or "all ranks wait here for a message"
        return f"{self.here(doing)} has waited {seconds:.0f} s: {who}"
