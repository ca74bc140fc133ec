"""Which passes, and calls of a kernel, come often enough to be recorded.

Recording takes the host time, which a few replays save again. What came ten times is recorded, as
it will probably come again. Where lengths change, a plan comes as often as the model has layers and
then never again. So if earlier plans came a few times and then stopped, a plan is recorded the
first time it comes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from ...comm.rank_group import Moved
from ...tape import Tape
from .graphs import Graphs

SEEN_BEFORE = 10  # passes before one is recorded, unless it is expected to come often
OFTEN = 4
RECENT = 8  # how many of the latest plans, or pairs, are looked at
GONE = 2  # how many of these must have stopped coming to judge by them
# Tapes of one plan, or of one call's pairs: more than a model has layers, each of which may have a
# softmax scale of its own.
MOST_KEPT = 256
MOST_KINDS = 1024  # of passes of one Comm, or of calls, that are remembered

T = TypeVar("T")
_LOCK = Lock()


class Seen:
    """A pass, or a call of a kernel, and how often it came.

    Attributes:
        tape: its tape, once it was recorded.
        moved: what the pass does to its rank's Comm, if something moves in it.
        kind: what is known of all passes, or calls, that are launched alike, if others may be.
        tables: what its tape is given besides the operands.
        failed: of a kind, whether a recording has failed. Then it is tried again later, and not
            with each plan, or pairs, of the kind.
    """

    __slots__ = "failed", "kind", "moved", "record_at", "tables", "tape", "times"

    def __init__(self) -> None:
        self.times, self.record_at, self.failed = 0, SEEN_BEFORE, False
        self.tape: Tape | Graphs | None = None
        self.moved: Moved | None = None
        self.kind: Seen | None = None
        self.tables: Sequence[Tensor] = ()

    def is_due(self) -> bool:
        """Counts a call without a tape. Whether it is time to ask if a tape pays."""
        self.times += 1
        return self.times == 1 or self.times > self.record_at

    def is_recorded(self, among: SeenBefore[Any]) -> bool:
        """Whether a call that is due is recorded now. If that fails, it is tried again later, as
        the reason may be gone by then."""
        if self.times <= self.record_at:
            return among.expected() >= OFTEN
        self.record_at *= 10
        return True


@dataclass(eq=False)
class Counted:
    """How often something came and in how many kinds, and when it came first and last, counted in
    calls of anything."""

    first: int
    last: int = 0
    times: int = 0
    kinds: int = 0


@dataclass(eq=False)
class Known:
    """What is known of one plan, or of one kernel call's pairs.

    Attributes:
        seen: its passes or calls, by everything else that tells them apart.
    """

    counted: Counted
    seen: dict[Hashable, Seen] = field(default_factory=dict)

    def of(self, key: Hashable, new: Callable[[], Seen] = Seen) -> Seen:
        """What is known of its passes, or calls, with this key, at first ``new()``. The oldest of
        many makes room."""
        seen = self.seen.get(key)
        if seen is None:
            seen = new()
            if len(self.seen) >= MOST_KEPT:
                self.seen.pop(next(iter(self.seen)), None)
            self.seen[key] = seen
        return seen


class Kinds(OrderedDict[Hashable, Seen]):
    """What is known of all passes, or calls, that are launched alike, by their kind and key: of the
    latest. Threads may share it."""

    def of(self, kind: Hashable) -> Seen:
        """What is known of a kind, which is the latest now."""
        with _LOCK:
            seen = self.setdefault(kind, Seen())
            self.move_to_end(kind)
            if len(self) > MOST_KINDS:
                self.popitem(last=False)
        return seen


class SeenBefore(Generic[T]):
    """What is known of plans, or of pairs, for as long as these live."""

    def __init__(self) -> None:
        self.known = WeakKeyDictionary[T, Known]()
        self._recent: deque[Counted] = deque(maxlen=RECENT)
        self._now = 0

    def of(self, which: T) -> Known:
        """Counts that it came once more, and returns what is known of it."""
        self._now += 1
        known = self.known.get(which)
        if known is None:
            known = self.known.setdefault(which, Known(Counted(self._now)))
            self._recent.append(known.counted)
        known.counted.last, known.counted.kinds = self._now, max(len(known.seen), 1)
        known.counted.times += 1
        return known

    def expected(self) -> float:
        """How often the newest will come, judging by those before it that have stopped coming; 0
        where these are too few."""
        newest = self._recent[-1].first
        gone = [c.times / c.kinds for c in list(self._recent) if c.last < newest]
        return 0 if len(gone) < GONE else median(gone)
