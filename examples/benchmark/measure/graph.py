"""A forward and a backward as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmark.compete.checking import NAMES, both_passes, largest
from benchmark.contestant import Attention
from benchmark.measure.timing import Marks
from benchmark.ranks import Ranks

WARM_UP = 3  # runs on a side stream before the capture, as torch asks for


class Captured:
    """An attention and its backward, captured on fixed tensors."""

    def __init__(self, attention: Attention, shards: Sequence[Tensor]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                both_passes(attention, shards)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.eager = both_passes(attention, shards)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = both_passes(attention, shards)

    def step(self, mark: Marks) -> Any:
        """One replay; see :class:`~.timing.Runner`."""
        mark()
        self.graph.replay()
        mark()
        return self.results

    def compare(self, ranks: Ranks) -> tuple[str, list[float]]:
        """Which results are the same bit for bit in two replays, and the errors relative to the
        same calls without a graph."""
        copies = []
        for _ in range(2):
            self.graph.replay()
            copies.append([t.clone() for t in self.results])
        same = [torch.equal(a, b) for a, b in zip(*copies, strict=True)]
        told = [all(each) for each in zip(*ranks.gather(same), strict=True)]
        differ = [name for name, equal in zip(NAMES, told, strict=True) if not equal]
        errors = largest(ranks, copies[0], self.eager)
        del self.eager
        if not differ:
            return "replays are the same bit for bit", errors
        if "out" in differ:
            errors = [float("inf"), float("inf")]
        return f"replays differ in {', '.join(differ)}", errors
