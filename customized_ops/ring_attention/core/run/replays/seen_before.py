"""Which passes, and calls of a kernel, come often enough to be recorded.

Recording takes the host time, which a few replays save again. What came ten times is recorded, as
it will probably come again. Where lengths change, a plan comes as often as the model has layers and
then never again. So if earlier plans came a few times and then stopped, a plan is recorded the
first time it comes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, MutableMapping, Sequence
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
MOST_KEPT = 32  # tapes of one plan, or of one call's pairs
GONE = 2  # how many of these must have stopped coming to judge by them

T = TypeVar("T")


class Seen:
    """A pass, or a call of a kernel, and how often it came.

    Attributes:
        tape: its tape, once it was recorded.
        moved: what the pass does to its rank's Comm, if something moves in it.
        kind: what is known of all passes that are launched alike, if others may be.
        tables: what its tape is given besides the operands.
    """

    __slots__ = "kind", "moved", "record_at", "tables", "tape", "times"

    def __init__(self) -> None:
        self.times, self.record_at = 0, SEEN_BEFORE
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

    def of(self, key: Hashable, new: Callable[[], Seen] = Seen) -> Seen | None:
        """What is known of its passes with this key, at first ``new()``; None where it has too many
        others."""
        if key not in self.seen and len(self.seen) < MOST_KEPT:
            self.seen[key] = new()
        return self.seen.get(key)


class Latest(OrderedDict[T, Known]):
    """What is known of the latest values, at most so many. Threads may share it."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._lock = most, Lock()

    def get(self, which: T, default: Any = None) -> Any:
        """What is known of a value, which is the latest now."""
        with self._lock:
            known = super().get(which, default)
            if known is not None:
                self.move_to_end(which)
        return known

    def setdefault(self, which: T, default: Any = None) -> Any:
        """What is known of a value, or else ``default`` from now on."""
        with self._lock:
            known = super().setdefault(which, default)
            if len(self) > self._most:
                self.popitem(last=False)
        return known


class SeenBefore(Generic[T]):
    """What is known of plans, or of pairs, for as long as these live; or of the values of which
    ``known`` keeps it."""

    def __init__(self, known: MutableMapping[T, Known] | None = None) -> None:
        self.known = WeakKeyDictionary[T, Known]() if known is None else known
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

    def tape(self, which: T, key: Hashable = None) -> Tape | None:
        """The tape of its calls with this key, if there is one."""
        known = self.known.get(which)
        seen = None if known is None else known.seen.get(key)
        return seen.tape if seen is not None and isinstance(seen.tape, Tape) else None

    def expected(self) -> float:
        """How often the newest will come, judging by those before it that have stopped coming; 0
        where these are too few."""
        newest = self._recent[-1].first
        gone = [c.times / c.kinds for c in list(self._recent) if c.last < newest]
        return 0 if len(gone) < GONE else median(gone)
