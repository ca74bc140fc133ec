"""One rank that computes as if it had peers, to time its part of their work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .messages import Comm, Messages, Reduction


class FakeComm(Comm):
    """Rank ``rank`` of ``size`` without the others: nothing arrives, and buffers for it are never
    written. Plans, buffers and kernel calls are the real ones; results are meaningless, and moving
    bytes takes no time. Of one rank, which has no peers, everything is real."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(f"fake:{rank}:{size}" if size > 1 else "", rank, size)

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        return lambda: None

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """The values stay this rank's."""

    def all_gather_object(self, value: object) -> list[object]:
        return [value] * self.size


def by_name(name: str) -> FakeComm:
    """The Comm called ``name``."""
    _, rank, size = name.split(":")
    return FakeComm(int(rank), int(size))
