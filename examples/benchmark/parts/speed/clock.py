"""Measures the times of functions that are compared."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from raw_attention import Pass

LONG_SECONDS = 0.5  # of timed runs per function, about
CACHE_BYTES = 256 * 2**20  # more than any L2 holds


class Clock:
    """Median seconds of functions that take turns."""

    def __init__(self, device: str, runs: int) -> None:
        self._cuda, self._runs = device == "cuda", runs
        if self._cuda:
            self._cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)

    def seconds(self, *functions: Pass) -> list[float]:
        """Median seconds of each function. After two runs of each to warm up and compile, up to
        ``runs`` of each are timed in turn, for about LONG_SECONDS of each: at least three, or one
        if a run takes longer than that.

        They take turns because clocks depend on heat. Their order alternates because a function
        finds the GPU as the one before it left it.
        """
        for function in functions:
            function()
        self._wait()
        began = perf_counter()
        for function in functions:
            function()
        self._wait()
        once = (perf_counter() - began) / len(functions)
        least = 3 if once < LONG_SECONDS else 1
        runs = max(least, min(self._runs, int(LONG_SECONDS / max(once, 1e-6))))
        times: list[list[Any]] = [[] for _ in functions]
        for turn in range(runs):
            order = list(zip(functions, times, strict=True))
            for function, mine in order if turn % 2 else reversed(order):
                mine.append(self._events(function) if self._cuda else _timed(function))
        self._wait()
        if self._cuda:
            times = [[start.elapsed_time(stop) / 1e3 for start, stop in mine] for mine in times]
        return [median(mine) for mine in times]

    def _events(self, function: Pass) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cache.zero_()
        start.record()
        function()
        stop.record()
        return start, stop

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _timed(function: Pass) -> float:
    began = perf_counter()
    function()
    return perf_counter() - began
