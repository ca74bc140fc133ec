"""What the benchmark of kernels runs in processes of its own, replaced; see ``own_process``."""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any


class Troubled:
    """Measures nothing; "torch" kills its process at the second mask, "cudnn" raises there."""

    def __init__(self, args: argparse.Namespace, kernel: str) -> None:
        self.kernel, self.asked = kernel, 0

    def __call__(self, mask: Any) -> Any:
        self.asked += 1
        if self.asked == 2 and self.kernel == "torch":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.asked == 2 and self.kernel == "cudnn":
            raise RuntimeError("an illegal memory access was encountered")
        row = mask.row(self.kernel)
        row.forward = row.backward = 100.0 * self.asked
        return row


class Slow:
    """Measures nothing: 1 GFLOP/s, whatever is asked. Prints to stdout, as libraries do."""

    def __init__(self, args: argparse.Namespace, kernel: str) -> None:
        self.kernel = kernel
        print("compiling", flush=True)

    def __call__(self, mask: Any) -> Any:
        row = mask.row(self.kernel)
        row.forward = row.backward = 1e-3
        return row


class Environment:
    """Says what a variable is in its process."""

    def __call__(self, name: str) -> str | None:
        return os.environ.get(name)


class Sleeper:
    """Sleeps as long as it is asked to."""

    def __call__(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds
