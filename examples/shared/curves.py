"""Loss curves of the examples: shown during training, and compared with those of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from shared.launch import verdict


def share_cores(processes: int) -> None:
    """Make torch use only this process's share of the cores."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // processes))


def losses_of(name: str, steps: int, tokens: int, step: Callable[[int], Tensor]) -> list[float]:
    """The losses that ``step(n)`` returns for each n below ``steps``; each is on ``tokens`` tokens.

    Rank 0 shows a progress bar, the loss every 10 steps, and the speed.
    """
    shown = dist.get_rank() == 0
    losses: list[float] = []
    bar = tqdm(range(steps), desc=name, unit="step", disable=None if shown else True)
    start = time.perf_counter()
    for n in bar:
        losses.append(step(n).item())
        if shown and (n % 10 == 0 or n == steps - 1):
            bar.write(f"{name}  step {n:3d}  loss {losses[-1]:.4f}")
    if shown:
        print(f"{name}: {steps * tokens / (time.perf_counter() - start):,.0f} tokens/s")
    return losses


def same_losses(cut: Sequence[float], alone: Sequence[float], allowed: float) -> int:
    """Print on rank 0 whether the loss curves differ by at most ``allowed``; returns 0 if so."""
    if dist.get_rank() == 0:
        print(f"loss {cut[0]:.4f} -> {cut[-1]:.4f}")
    # numpy's max, unlike Python's, is NaN where any loss is.
    difference = float(np.abs(np.subtract(cut, alone)).max())
    return verdict("the loss curve is that of one process", difference, allowed)
