"""A plan carried out in time, event by event, without a device: :func:`simulate`.

:mod:`.counts` says what every rank sends and attends in each step, :mod:`.ranks` what a kernel, a
launch or a message does to the clocks of all ranks, and :mod:`.schedule` in which order the
executor issues them. The result is a :class:`.Timeline`.

.. include:: ../../../docs/many_hosts.md
"""

from .simulation import simulate
from .timeline import PassTimeline, Spans, Timeline

__all__ = ["PassTimeline", "Spans", "Timeline", "simulate"]
