"""How fast a GPU's clock ran. A pass costs cycles, and the power limit decides how many there are
per second. So cycles measure a program, and milliseconds the program together with the GPU.

On a GPU at its power limit, anything that draws power slows the clock, such as links between GPUs
that are awake, or heat. Two programs with equal cycles then take different times.
"""

from __future__ import annotations

import importlib.util

import torch

THREADS = 1024  # of a block; two fill a multiprocessor, so that all get blocks
STAMP_MS = 0.05  # time that a host is given for a stamp


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
        """A new clock; None where there is nothing to count with."""
        found = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        return Clock(device) if found else None

    def stamp(self) -> None:
        """Record the counts at this point, the first or the second."""
        self._kernel(next(self._free), num_warps=THREADS // 32)

    def megahertz(self) -> float | None:
        """The mean frequency from the first stamp to the second; read it only when the device has
        passed the second. None if no multiprocessor ran a block of both."""
        first, last = self._stamps
        both = (first[:, 1] != 0) & (last[:, 1] != 0)
        cycles, nanoseconds = (last - first)[both].double().unbind(1)
        return float((cycles / nanoseconds).mean()) * 1e3 if len(cycles) else None
