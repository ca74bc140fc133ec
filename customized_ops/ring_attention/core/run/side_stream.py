"""A second stream beside the caller's: what waits for peers runs on it, all else on the caller's.

A GPU that finds no more blocks to start on one stream starts those of the other. So waiting for
peers costs nothing while there is other work, and neither does the end of a kernel, when it no
longer fills the GPU. The second stream has priority: what it computes must still travel home.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TypeVar

import torch

from ..tape import launch, refuse

T = TypeVar("T")
NOTHING: AbstractContextManager[None] = nullcontext()

# Whether a GPU takes the work of all streams in the order in which the host gives it, so that what
# waits holds up what comes after; CUDA, too, reads the variable once.
ONE_QUEUE = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


class SideStream:
    """The caller's stream and, if ``two``, a second one beside it, never on a CPU.

    A tensor may be used on either between :meth:`fork` and :meth:`join` if it lives until then:
    the second stream starts after all that the first was given before, and the first goes on after
    all that the second was given.
    """

    def __init__(self, device: torch.device, *, two: bool) -> None:
        self.two = two and device.type == "cuda"
        if self.two:
            index = device.index
            self._pair = _pair_of(device, torch._C._cuda_getCurrentRawStream(index))
            # The faster way to change streams changes the current device, too.
            self._here = torch.cuda.current_device() == index

    def fork(self) -> None:
        """Let the second stream start."""
        if self.two:
            self._pair.fork()

    def second(self) -> AbstractContextManager[object]:
        """In this context work goes to the second stream."""
        if not self.two:
            return NOTHING
        if self._here:
            return self._pair
        refuse()
        return torch.cuda.stream(self._pair.second)

    def join(self) -> None:
        """Let the first stream wait for the second."""
        if self.two:
            self._pair.join()


def keeping_stream(device: torch.device, function: Callable[[], T]) -> T:
    """``function()``, which leaves the current stream as it was; on an error, it is set back."""
    if device.type != "cuda":
        return function()
    stream_id, device_index, device_type = torch._C._cuda_getCurrentStream(device.index)
    try:
        return function()
    except BaseException:
        before = torch.cuda.Stream(
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
        torch.cuda.set_stream(before)
        raise


class StreamPair:
    """A stream and the second one beside it, kept from call to call with the events by which they
    wait for each other. (torch itself makes an event for each wait, and looks at all devices to
    change streams.) As a context, never nested, the pair makes its second stream the current one,
    on the device of both. It is an argument of a tape's steps, so a tape can be given another."""

    def __init__(self, main: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
        self.main, self.second = main, second
        self._given, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        launch(StreamPair._fork, self)

    def join(self) -> None:
        launch(StreamPair.join_now, self)

    def __enter__(self) -> None:
        launch(StreamPair._to_second, self)

    def __exit__(self, *_: object) -> None:
        launch(StreamPair._to_main, self)

    def _fork(self) -> None:
        self._given.record(self.main)
        self.second.wait_event(self._given)

    def join_now(self) -> None:
        """:meth:`join`, but not recorded in a tape."""
        self._done.record(self.second)
        self.main.wait_event(self._done)

    def _to_second(self) -> None:
        torch.cuda.set_stream(self.second)

    def _to_main(self) -> None:
        torch.cuda.set_stream(self.main)


@lru_cache(maxsize=64)
def _pair_of(device: torch.device, caller: int) -> StreamPair:
    """One pair for each of a caller's streams, by its handle, as these run in no order. (torch
    takes streams from a pool of 32, so a program with more of high priority may share one.)"""
    return StreamPair(torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1))
