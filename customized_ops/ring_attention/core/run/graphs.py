"""Short passes that come again with the same addresses, as CUDA graphs.

A tape takes the host 5 to 10 us a step; a graph takes it one launch, but has addresses in it. Where
a program repeats its steps, the allocator gives each layer's tensors the addresses that they had at
the step before. So nothing is copied: a pass has a graph for each set of addresses of its inputs
and results, which are new tensors as they are without. Memory that is needed during a pass alone is
the graphs' own, and all those of one stream share it, as they follow one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from annotations.waiting import tell

from ..tape import Tape
from .side_stream import StreamPair

# Of the tensors that a pass is given; above, the GPU takes longer than a tape takes the host.
SHORT_BYTES = 256 << 20
SEEN_BEFORE = 3  # passes of the same addresses before a graph is made of them
MOST = 128  # graphs of one tape, so that each layer may have one
PATIENCE = 128 * MOST

Given = Sequence[Tensor | None]
Launch = Callable[[], None]


class Maker(Protocol):
    """Makes graphs of tapes that return nothing, and of their inputs."""

    def rehearse(self, tape: Tape, given: Given) -> bool:
        """Run it with memory that its graph will have; False for nothing, where there is none."""

    def capture(self, tape: Tape, given: Given) -> Launch:
        """Its graph, which was rehearsed."""


class Graphs:
    """Of one tape, made by ``maker``."""

    def __init__(self, tape: Tape, maker: Maker) -> None:
        self._tape, self._apart, self._maker = tape, tape.apart(), maker
        # By the addresses; or how often they came.
        self._of: dict[tuple[int, ...], Launch | int] = {}
        self._full = 0  # passes of further addresses, for which there was no room

    def run(self, given: Given) -> tuple[Tensor, ...]:
        """See :meth:`..tape.Tape.run`."""
        if self._apart is None or capturing(given):
            return self._tape.run(given)
        make, fill = self._apart
        made = make.run(())
        tensors = (*given, *made)
        addresses = tuple([t.data_ptr() for t in tensors if t is not None])
        known = self._of.get(addresses, 0)
        if isinstance(known, int):
            self._of_few(addresses, known, fill, tensors)
        else:
            known()
        return made[: len(self._tape.results)]

    def _of_few(self, addresses: tuple[int, ...], times: int, fill: Tape, tensors: Given) -> None:
        """Run it at addresses that came so many times before."""
        if times <= SEEN_BEFORE:
            rehearsed = times == SEEN_BEFORE and self._maker.rehearse(fill, tensors)
            if not rehearsed:
                fill.run(tensors)
            self._keep(addresses, times + 1 if times < SEEN_BEFORE or rehearsed else 0)
        else:
            try:
                graph = self._maker.capture(fill, tensors)
            except RuntimeError as error:
                tell(f"seqshard: passes of attention are not made CUDA graphs: {error}")
                self._apart = None
                fill.run(tensors)
            else:
                self._keep(addresses, graph)
                graph()

    def _keep(self, addresses: tuple[int, ...], known: Launch | int) -> None:
        if addresses in self._of or len(self._of) < MOST:
            self._of[addresses] = known
            return
        self._full += 1
        if self._full % PATIENCE == 0:  # those that have no graph yet may never come again
            self._of = {a: graph for a, graph in self._of.items() if not isinstance(graph, int)}


def capturing(given: Given) -> bool:
    """Whether a CUDA graph is being captured on the device of these tensors."""
    device = next(t.device for t in given if t is not None)
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def of_tape(tape: Tape, given: Given) -> Tape | Graphs:
    """What gives a device a pass that was recorded of these tensors, on its current stream."""
    there = [t for t in given if t is not None]
    if not there[0].is_cuda or sum(t.nbytes for t in there) > SHORT_BYTES:
        return tape
    device = there[0].device
    return Graphs(tape, _studio_of(device, torch._C._cuda_getCurrentRawStream(device.index)))


class Studio:
    """Where graphs of one of a device's streams are made: two streams in place of that and of the
    second one beside it, and memory that all these graphs share."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock, self._failed = device, threading.Lock(), False
        second = torch.cuda.Stream(device, priority=-1)
        self._pair = StreamPair(torch.cuda.Stream(device), second)
        # torch cannot use memory of graphs again that are all gone, so one stays.
        self._first = torch.cuda.CUDAGraph()
        with self._here():
            self._first.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            self._first.capture_end()
        self._memory: Any = SimpleNamespace(id=self._first.pool())

    def rehearse(self, tape: Tape, given: Given) -> bool:
        """See :class:`Maker`. What memory it takes is there when the graph is captured."""
        free, _ = torch.cuda.mem_get_info(self._device)
        if self._failed or free < 2 * sum(t.nbytes for t in given if t is not None):
            return False  # memory that torch has kept of other tensors is not for graphs
        caller = torch.cuda.current_stream(self._device)
        with self._lock:
            self._pair.main.wait_stream(caller)
            with torch.cuda.use_mem_pool(self._memory, self._device), self._here():
                tape.with_arguments(self._in_place_of).run(given)
            caller.wait_stream(self._pair.main)
        return True

    def capture(self, tape: Tape, given: Given) -> Launch:
        """See :class:`Maker`. Nothing is launched, and the host waits for nothing."""
        graph = torch.cuda.CUDAGraph()
        with self._lock:
            try:
                with self._here():
                    self._capture(graph, tape, given)
            except BaseException:
                self._failed = True
                self._mend()
                raise
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, tape: Tape, given: Given) -> None:
        # Of this thread only: NCCL's own may look at what is long done meanwhile.
        graph.capture_begin(self._memory.id, capture_error_mode="thread_local")
        try:
            with self._here():  # a step that fails may leave another stream
                tape.with_arguments(self._in_place_of).run(given)
        finally:
            graph.capture_end()

    def _mend(self) -> None:
        """After a capture that failed, torch refuses random numbers, and keeps what was freed."""
        index = self._device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(Exception):  # there is no public way, and not each failure needs one
            torch._C._cuda_endAllocateToPool(index, self._memory.id)

    def _here(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._pair.main)

    def _in_place_of(self, argument: Any) -> Any:
        """What a step is given."""
        return self._pair if isinstance(argument, StreamPair) else argument


@lru_cache(maxsize=64)
def _studio_of(device: torch.device, stream: int) -> Studio:
    """By the stream's handle: the work of different streams is in no order."""
    return Studio(device)
