"""How much of a training's time goes into plans of new batches, and who is told.

A plan is made once for all layers of a batch. Where lengths change with every step, that is time
before the first kernel which :func:`~..packed_batches.packed_batches` would hide.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from time import perf_counter

# As many of the last plans are looked at, more than a model needs for one batch; made in more than
# so many seconds, which are those of several batches.
LAST = 50
LEAST_SECONDS = 1.0
MOST = 1 / 20


class PlanningShare:
    """Warns once, where the last plans took more than MOST of the time that they were made in."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, float]] = deque(maxlen=LAST)  # when, and seconds of making
        self._warned = False

    def add(self, seconds: float) -> None:
        """A call has waited so long for its plan, until now."""
        # Ranks that are threads share one core's Python; what they wait for says nothing.
        if self._warned or threading.current_thread() is not threading.main_thread():
            return
        self._made.append((perf_counter(), seconds))
        if len(self._made) < LAST:
            return
        elapsed = self._made[-1][0] - self._made[0][0]
        planning = sum(seconds for _, seconds in self._made) - self._made[0][1]
        if elapsed > LEAST_SECONDS and planning > MOST * elapsed:
            self._warned = True
            warnings.warn(
                f"planning attention for new lengths took {planning / elapsed:.0%} of the last "
                f"{elapsed:.3g} s; make plans ahead of time with packed_batches, or let a "
                "DataLoader's workers do it with PackDocuments (customized_ops.ring_attention)",
                stacklevel=2,
            )


PLANNING = PlanningShare()
