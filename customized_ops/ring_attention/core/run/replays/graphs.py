"""Short passes that come again with the same addresses, as CUDA graphs.

A tape costs the host 5 to 10 us for each of its steps. A graph costs it one launch, but has
addresses in it. In a program that repeats its steps, the allocator gives the tensors of each layer
the addresses that they had at the step before. So a pass has one graph for each set of addresses of
its inputs and results, and nothing is copied; results are new tensors, as they are without graphs.
Memory that only the pass needs belongs to the graphs. All graphs of a stream share it, because they
run one after the other.
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

from ...tape import Tape
from ..side_stream import ONE_QUEUE, StreamPair

# Bytes of the tensors that a pass is given. Longer passes take the GPU longer than the host.
SHORT_BYTES = 256 << 20
# Passes before addresses are looked at, of a tape that was recorded the first time: its lengths are
# probably new, so it comes once for each layer and then never again.
EARLY = 32
BEFORE = 4  # passes with the same addresses before they become a graph
MOST_OF_TAPE, MOST = 128, 512  # graphs of one tape, and of all tapes that share memory
# How many passes with unknown addresses a full tape sees before it drops unused graphs, and how
# many passes with the same addresses come before a capture that failed is tried again.
PATIENCE = 128 * MOST_OF_TAPE

Given = Sequence[Tensor | None]
Launch = Callable[[], None]
Capture = Callable[[Tape, Given], Launch | None]


@dataclass(slots=True)
class Known:
    """A set of addresses, and how often they came.

    Attributes:
        launch: launches their graph, if there is one.
        used: whether they came since graphs were dropped last.
    """

    times: int = 0
    launch: Launch | None = None
    used: bool = True


class Graphs:
    """The graphs of one tape. ``capture`` takes a tape that returns nothing, and its inputs. It
    returns what launches their graph, or None if there is no memory for one. In the first ``early``
    passes nothing is done for graphs."""

    def __init__(self, tape: Tape, capture: Capture, early: int = 0) -> None:
        self._tape, self._capture = tape, capture
        self._early, self._apart = early, None if early else tape.apart()
        self._of_addresses: dict[tuple[int, ...], Known] = {}
        self._without_room = 0

    def run(self, given: Given) -> tuple[Tensor, ...]:
        """See :meth:`...tape.Tape.run`."""
        if self._early > 0:
            self._early -= 1
            if self._early <= 0:
                self._apart = self._tape.apart()
        if self._apart is None:
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
        """Addresses that came for the first time. They are remembered if there is room."""
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
        except Exception as error:  # nothing was launched yet, so the tape can still run
            tell(
                f"seqshard: passes of attention are not made CUDA graphs: {error}. "
                "SEQSHARD_REPLAY=tapes turns them off"
            )
            self._apart = None
            return None


def of_tape(tape: Tape, given: Given, *, is_new: bool = False) -> Tape | Graphs:
    """What replays a pass that was recorded with these tensors, on the current stream: graphs, or
    the tape alone where graphs do not help or cannot be made. ``is_new``: the pass had not come
    before."""
    there = [t for t in given if t is not None]
    if not there[0].is_cuda or sum(t.nbytes for t in there) > SHORT_BYTES or ONE_QUEUE:
        return tape
    if torch.cuda.memory.get_allocator_backend() != "native":  # no other keeps memory of graphs
        return tape
    device = there[0].device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return Graphs(tape, partial(_capture, device, stream), EARLY if is_new else 0)


def _capture(device: torch.device, stream: int, tape: Tape, given: Given) -> Launch | None:
    return _studio_of(device, stream).capture(tape, given)


class Studio:
    """Captures the graphs of one stream of a device. It has two streams of its own, which stand for
    the caller's stream and the second one beside it, and memory that all its graphs share."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: torch.cuda.CUDAGraph | None = None  # kept, because torch may still use it
        self._memory: Any = None
        second = torch.cuda.Stream(device, priority=-1)
        self._pair = StreamPair(torch.cuda.Stream(device), second)
        # torch cannot reuse the memory of graphs once all of them are gone, so one stays.
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
            return None  # memory that torch keeps for other tensors cannot be used by graphs
        graph = torch.cuda.CUDAGraph()
        caller = torch.cuda.current_stream(self._device)
        for constant in tape.constants:
            if constant.is_cuda:
                constant.record_stream(caller)  # the graph knows only its address
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
        """Captures what is done inside. An error inside ends the capture, too."""
        caller, main = torch.cuda.current_stream(self._device), self._pair.main
        main.wait_stream(caller)  # a capture sets torch's random numbers on its stream
        collects = gc.isenabled()
        gc.disable()  # a capture may fail if some tensors are freed meanwhile
        try:
            with torch.cuda.stream(main):
                # Rules of a capture bind this thread only: NCCL's own may query events meanwhile.
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
        """Join the two streams, after an error too: a capture must end on one stream."""
        with torch.cuda.stream(self._pair.second):
            apart = torch.cuda.is_current_stream_capturing()
        if apart:
            with suppress(RuntimeError):  # a capture that is invalid already
                self._pair.join_now()

    def _mend(self) -> None:
        """After a failed capture torch refuses to draw random numbers, and does not free memory.
        So the generator gets a copy of its state; graphs that the program captured before keep the
        old one."""
        index = self._device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(Exception):  # there is no public function, and not every failure needs it
            torch._C._cuda_endAllocateToPool(index, self._memory)

    def _in_place_of(self, argument: Any) -> Any:
        """What a step is given in a capture in place of an argument of its own."""
        return self._pair if isinstance(argument, StreamPair) else argument


@lru_cache(maxsize=64)
def _studio_of(device: torch.device, stream: int) -> Studio:
    """One for each stream, by its handle, because different streams run at the same time."""
    return Studio(device)
