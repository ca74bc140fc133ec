"""How fast a GPU's clock ran: a pass costs cycles, and the limit on power says how many there are a
second. So cycles tell what a program does, and milliseconds what it and the GPU do.

On a GPU at its limit all that draws power slows the clock: links between GPUs that are awake, or
heat. Two programs of as many cycles then take different times.
"""

from __future__ import annotations

import importlib.util

import torch

THREADS = 1024  # of a block; two fill a multiprocessor, so blocks come to all
STAMP_MS = 0.05  # that a host is given for a stamp


class Clock:
    """Counts on every multiprocessor, at two points of the current stream."""

    def __init__(self, device: torch.device) -> None:
        from benchmark.measure.clock_kernel import stamp

        size = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernel = stamp[(2 * size,)]
        self._stamps = torch.zeros(2, size, 2, dtype=torch.int64, device=device)
        self._free = iter(self._stamps)

    @staticmethod
    def of(device: torch.device) -> Clock | None:
        """A new one; None where there is nothing to count with."""
        found = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return Clock(device) if found else None

    def stamp(self) -> None:
        """Note the counts at this point, the first or the second."""
        self._kernel(next(self._free), num_warps=THREADS // 32)

    def megahertz(self) -> float | None:
        """The mean frequency from the first stamp to the second; to be read when the device has
        passed that. None where no multiprocessor ran a block of both."""
        first, last = self._stamps
        both = (first[:, 1] != 0) & (last[:, 1] != 0)
        cycles, nanoseconds = (last - first)[both].double().unbind(1)
        return float((cycles / nanoseconds).mean()) * 1e3 if len(cycles) else None
