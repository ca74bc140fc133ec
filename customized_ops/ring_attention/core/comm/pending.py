"""Exchanges that are on their way, and what they have moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Pending:
    """Something that is on its way; ``wait()`` returns it, once. ``placed`` is its place in memory
    that peers write to, if it has one. If it travels in two parts, ``go_on`` ends the first and
    starts the second."""

    def __init__(
        self,
        finish: Callable[[], Any],
        placed: Any = None,
        go_on: Callable[[], None] | None = None,
    ) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._go_on = go_on
        self.placed = placed

    def go_on(self) -> None:
        """Block until the first part of its way is over, and start the second. All ranks call this
        in the same order."""
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()

    def wait(self) -> Any:
        """Block until it is here (on a GPU: until the stream may use it), and free what was kept
        for it."""
        self.go_on()
        finish, self._finish = self._finish, None
        assert finish is not None, "it was waited for before"
        return finish()


@dataclass
class Counters:
    """Bytes sent to and received from other ranks; for an all-reduce, those of a ring."""

    sent_bytes: int = 0
    received_bytes: int = 0
