"""Which passes, and calls of a kernel, come often enough to be recorded.

Recording takes the host as long as some ten passes, and a pass from its tape spares it more than
half. So what came ten times is recorded; or thirty times, where what came before it came less often
and then no more: where lengths change, a batch is attended by as many calls as a model has layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ..comm.rank_group import Moved
from ..tape import Tape
from .graphs import Graphs

SEEN_BEFORE, WORTH = 10, 30
RECENT = 8  # plans, or pairs, that are looked at, and how many of these came no more at the least
GONE = 2

T = TypeVar("T")


class Seen:
    """A pass, or a kernel's call, that came so many times.

    Attributes:
        tape: its tape, once it was recorded.
        moved: what a pass that moves something does to its rank's Comm.
    """

    __slots__ = "moved", "record_at", "tape", "times"

    def __init__(self) -> None:
        self.times, self.record_at = 0, SEEN_BEFORE
        self.tape: Tape | Graphs | None = None
        self.moved: Moved | None = None

    def is_due(self) -> bool:
        """Counts a call without a tape: whether it came often enough to look whether it pays."""
        self.times += 1
        return self.times > self.record_at

    def is_recorded(self, among: SeenBefore[Any]) -> bool:
        """Of a call that is due. One that could not be recorded is recorded again ten times as
        late: what kept it may have passed."""
        if self.times <= WORTH and not among.pays():
            self.record_at = WORTH
            return False
        self.record_at *= 10
        return True


@dataclass(eq=False)
class Counted:
    """How often something came, of so many kinds, and its first and last number among all."""

    first: int
    last: int = 0
    times: int = 0
    kinds: int = 0


@dataclass(eq=False)
class Known:
    """What is known of one plan, or of pairs.

    Attributes:
        seen: by all that matters beside.
    """

    counted: Counted
    seen: dict[Hashable, Seen] = field(default_factory=dict)


class SeenBefore(Generic[T]):
    """Of plans, or of pairs, as long as these live: ``known``."""

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[T, Known] = WeakKeyDictionary()
        self._recent: deque[Counted] = deque(maxlen=RECENT)
        self._now = 0

    def of(self, which: T) -> Known:
        """What is known of it, which came once more."""
        self._now += 1
        known = self.known.get(which)
        if known is None:
            known = self.known[which] = Known(Counted(self._now))
            self._recent.append(known.counted)
        known.counted.last, known.counted.kinds = self._now, max(len(known.seen), 1)
        known.counted.times += 1
        return known

    def pays(self) -> bool:
        """Whether what comes often now will come often enough, by those that came before it and no
        more since."""
        newest = self._recent[-1].first
        gone = [c.times / c.kinds for c in list(self._recent) if c.last < newest]
        return len(gone) < GONE or median(gone) >= WORTH
