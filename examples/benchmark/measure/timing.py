"""Timed runs: contestants take turns, and ranks start together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmark.contestant import Attention
from benchmark.measure.clocks import STAMP_MS, Clock
from benchmark.ranks import Ranks

CYCLES_A_MS = 1_900_000  # of an H200's clock, about


class Marks:
    """Points in time, on the device's stream or, on a CPU, on the host."""

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._points = cuda, []  # type: ignore[var-annotated]

    def __call__(self) -> None:
        """Mark this point."""
        if self._cuda:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        else:
            point = perf_counter()
        self._points.append(point)

    def milliseconds(self) -> list[float]:
        """Times from each point to the next; read them only when the device has passed the last."""
        pairs = zip(self._points, self._points[1:], strict=False)
        if self._cuda:
            return [a.elapsed_time(b) for a, b in pairs]
        return [1e3 * (b - a) for a, b in pairs]


@dataclass
class Runner:
    """One contestant ready to run.

    Attributes:
        step: one forward and backward; marks its start, the end of the forward if that is known,
            and the end.
        times: for each run, the passes' milliseconds on this rank.
        megahertz: for each run of :func:`take_turns`, the clock of this rank's GPU; None: unknown.
    """

    name: str
    step: Callable[[Marks], Any]
    times: list[list[float]] = field(default_factory=list)
    megahertz: list[float | None] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, attention: Attention, shards: Sequence[Tensor]) -> Runner:
        """The runner of an attention and its tensors."""
        *leaves, dout = shards

        def step(mark: Marks) -> Any:
            mark()
            out = attention(*leaves)
            mark()
            grads = torch.autograd.grad(out, leaves, dout)
            mark()
            return out, grads

        return cls(name, step)

    def medians(self, ranks: Ranks) -> list[float]:
        """Milliseconds of forward, backward and both, or only of both: medians over runs, of the
        slowest rank."""
        columns = [list(c) for c in zip(*self.times, strict=True)]
        if len(columns) > 1:
            columns.append([sum(run) for run in self.times])
        told = ranks.gather([median(c) for c in columns])
        return [max(each) for each in zip(*told, strict=True)]

    def clock(self, ranks: Ranks) -> tuple[float, float] | None:
        """Millions of cycles of all passes, on the rank that takes the most, and the MHz of the
        slowest rank; medians over runs. None if these are unknown on any rank."""
        mine = None
        known = [(sum(t), f) for t, f in zip(self.times, self.megahertz, strict=False) if f]
        if known:
            mine = median(1e-3 * ms * f for ms, f in known), median(f for _, f in known)
        told = ranks.gather(mine)
        if None in told:
            return None
        cycles, megahertz = zip(*told, strict=True)
        return max(cycles), min(megahertz)


def take_turns(
    runners: Sequence[Runner],
    ranks: Ranks,
    runs: int,
    lead_ms: float,
    progress: Callable[[Iterable[int]], Iterable[int]],
) -> None:
    """``runs`` rounds, in each of which every runner runs once, so that clocks and heat are the
    same for all. Each round has a different order, the same on all ranks, so that no runner always
    runs after the same one.

    Args:
        lead_ms: how long a device waits before each run. Meanwhile its host queues the first calls,
            as in a model, where attention follows other work.
    """
    taken: list[tuple[Runner, Marks, Clock | None]] = []
    first = Clock.of(ranks.device)
    if first is not None:
        first.stamp()  # compiles the kernel
    for run in progress(range(runs)):
        for runner in Random(run).sample(runners, len(runners)):
            mark, clock = Marks(ranks.cuda), Clock.of(ranks.device)
            if ranks.cuda and lead_ms:
                of_clock = STAMP_MS if clock is not None else 0.0
                torch.cuda._sleep(int((lead_ms + of_clock) * CYCLES_A_MS))
            ranks.together()
            if clock is not None:
                clock.stamp()
            runner.step(mark)
            if clock is not None:
                clock.stamp()
            taken.append((runner, mark, clock))
    ranks.wait()
    for runner in runners:
        own = [(mark, clock) for other, mark, clock in taken if other is runner]
        runner.times = [mark.milliseconds() for mark, _ in own]
        runner.megahertz = [None if clock is None else clock.megahertz() for _, clock in own]


def first_run(runner: Runner, ranks: Ranks, mark: Marks | None = None) -> tuple[float, int]:
    """One run by itself: its milliseconds, and the most bytes that it took beyond those already
    allocated (0 if the device cannot tell), each the largest over the ranks. ``runner`` keeps its
    time.

    Args:
        mark: new marks, which may record something else as well.
    """
    ranks.wait()
    if ranks.cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ranks.cuda else 0
    mark = Marks(ranks.cuda) if mark is None else mark
    ranks.together()
    kept = runner.step(mark)
    ranks.wait()
    del kept
    most = torch.cuda.max_memory_allocated() - before if ranks.cuda else 0
    runner.times = [mark.milliseconds()]
    told = ranks.gather([sum(runner.times[0]), most])
    return max(t for t, _ in told), max(m for _, m in told)
