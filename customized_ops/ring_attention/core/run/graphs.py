"""Short passes that come again with the same addresses, as CUDA graphs.

A tape takes the host 5 to 10 us a step; a graph takes it one launch, but has addresses in it. Where
a program repeats its steps, the allocator gives each layer's tensors the addresses that they had at
the step before. So nothing is copied: a pass has a graph for each set of addresses of its inputs
and results, which are new tensors as they are without. Memory that is needed during a pass alone is
the graphs' own, and all those of one stream share it, as they follow one another.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from annotations.waiting import tell

from ..tape import Tape
from .side_stream import ONE_QUEUE, StreamPair

# Of the tensors that a pass is given; above, the GPU takes longer than a tape takes the host.
SHORT_BYTES = 256 << 20
BEFORE = 4  # passes of the same addresses that come before a graph is made of them
MOST_OF_TAPE, MOST = 128, 512  # graphs of one tape, and of all that share memory
# Passes of addresses for which there is no room, after which room is made; and for which none is
# made a graph where that could not be done.
PATIENCE = 128 * MOST_OF_TAPE

Given = Sequence[Tensor | None]
Launch = Callable[[], None]
Capture = Callable[[Tape, Given], Launch | None]


@dataclass(slots=True)
class Known:
    """Addresses that came so many times; used: whether their graph was since room was made."""

    times: int = 0
    launch: Launch | None = None
    used: bool = True


class Graphs:
    """The graphs of one tape. ``capture`` makes one, of a tape that returns nothing and its inputs;
    or None, where there is no memory for it."""

    def __init__(self, tape: Tape, capture: Capture) -> None:
        self._tape, self._apart, self._capture = tape, tape.apart(), capture
        self._of_addresses: dict[tuple[int, ...], Known] = {}
        self._without_room = 0

    def run(self, given: Given) -> tuple[Tensor, ...]:
        """See :meth:`..tape.Tape.run`."""
        if self._apart is None or capturing(given):
            return self._tape.run(given)
        make, fill = self._apart
        made = make.run(())
        tensors = (*given, *made)
        addresses = tuple([t.data_ptr() for t in tensors if t is not None])
        known = self._of_addresses.get(addresses)
        if known is None:
            known = self._met(addresses)
        known.times += 1
        if known.times > BEFORE and known.launch is None:
            known.launch = self._captured(fill, tensors)
            known.times = 0 if known.launch else -PATIENCE
        known.used = True
        if known.launch is None:
            fill.run(tensors)
        else:
            known.launch()
        return made[: len(self._tape.results)]

    def _met(self, addresses: tuple[int, ...]) -> Known:
        """For the first time; they are remembered if there is room."""
        known = Known()
        if len(self._of_addresses) >= MOST_OF_TAPE:
            self._without_room += 1
            if self._without_room % PATIENCE:
                return known
            for old, each in list(self._of_addresses.items()):
                if each.launch is None or not each.used:
                    self._of_addresses.pop(old, None)
                each.used = False
        if len(self._of_addresses) < MOST_OF_TAPE:
            self._of_addresses[addresses] = known
        return known

    def _captured(self, fill: Tape, tensors: Given) -> Launch | None:
        try:
            return self._capture(fill, tensors)
        except Exception as error:  # nothing was launched, so whatever it is, there is the tape
            tell(
                f"seqshard: passes of attention are not made CUDA graphs: {error}; without a try: "
                "SEQSHARD_REPLAY=tapes"
            )
            self._apart = None
            return None


def capturing(given: Given) -> bool:
    """Whether a CUDA graph is being captured on the device of these tensors."""
    device = next(t.device for t in given if t is not None)
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def of_tape(tape: Tape, given: Given) -> Tape | Graphs:
    """What gives a device a pass that was recorded of these tensors, on its current stream."""
    there = [t for t in given if t is not None]
    if not there[0].is_cuda or sum(t.nbytes for t in there) > SHORT_BYTES or ONE_QUEUE:
        return tape
    if torch.cuda.memory.get_allocator_backend() != "native":  # which alone keeps graphs' memory
        return tape
    device = there[0].device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return Graphs(tape, partial(_capture, device, stream))


def _capture(device: torch.device, stream: int, tape: Tape, given: Given) -> Launch | None:
    return _studio_of(device, stream).capture(tape, given)


class Studio:
    """Where graphs of one of a device's streams are made: two streams in place of that and of the
    second one beside it, and memory that all these graphs share."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: torch.cuda.CUDAGraph | None = None  # kept, as torch may still look at it
        self._memory: Any = None
        second = torch.cuda.Stream(device, priority=-1)
        self._pair = StreamPair(torch.cuda.Stream(device), second)
        # torch cannot use memory of graphs again that are all gone, so one stays.
        self._first = torch.cuda.CUDAGraph()
        with self._capturing(self._first, None):
            torch.zeros(1, device=device)
        self._memory = self._first.pool()

    def capture(self, tape: Tape, given: Given) -> Launch | None:
        """See :class:`Graphs`. Nothing is launched, and the host waits for nothing."""
        if self._failed is not None or len(self._graphs) >= MOST:
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < 2 * sum(t.nbytes for t in given if t is not None):
            return None  # what torch keeps of other tensors is not for graphs
        graph = torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self._device)
        for constant in tape.constants:
            if constant.is_cuda:
                constant.record_stream(caller)  # of which the graph has its address alone
        with self._lock:
            try:
                with self._capturing(graph, self._memory):
                    tape.with_arguments(self._in_place_of).run(given)
            except torch.OutOfMemoryError:
                return None
            self._graphs.add(graph)
        return graph.replay

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, memory: Any) -> Iterator[None]:
        """What is done inside is captured; if it ends in an error, so does the capture."""
        caller, main = torch.cuda.current_stream(self._device), self._pair.main
        main.wait_stream(caller)  # a capture sets torch's random numbers on its stream
        collects = gc.isenabled()
        gc.disable()  # what it frees may be such that a capture fails
        try:
            with torch.cuda.stream(main):
                # Of this thread only: NCCL's own may look at what is long done meanwhile.
                graph.capture_begin(memory, capture_error_mode="thread_local")
                try:
                    with torch.cuda.stream(main):  # an error may leave another stream
                        yield
                finally:
                    self._meet()
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except BaseException:
            self._failed = graph
            self._mend()
            raise
        finally:
            if collects:
                gc.enable()
        caller.wait_stream(main)

    def _meet(self) -> None:
        """Both streams are one again, after an error too: a capture ends on one."""
        with torch.cuda.stream(self._pair.second):
            apart = torch.cuda.is_current_stream_capturing()
        if apart:
            with suppress(RuntimeError):  # a capture that is invalid already
                self._pair.join_now()

    def _mend(self) -> None:
        """After a capture that failed, torch refuses random numbers, and keeps what was freed. (The
        generator gets another state, equal to its own: graphs of the program that were captured
        before keep the old one.)"""
        index = self._device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(Exception):  # there is no public way, and not each failure needs one
            torch._C._cuda_endAllocateToPool(index, self._memory)

    def _in_place_of(self, argument: Any) -> Any:
        """What a step is given."""
        return self._pair if isinstance(argument, StreamPair) else argument


@lru_cache(maxsize=64)
def _studio_of(device: torch.device, stream: int) -> Studio:
    """By the stream's handle: the work of different streams is in no order."""
    return Studio(device)
