"""Ranks for the examples: those of torchrun, or a requested number of processes started here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def count(text: str) -> int:
    """A positive number, from an argument."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def start_ranks(number: int) -> None:
    """Run this script again, as ``number`` ranks under torchrun; returns on those ranks only."""
    if "RANK" in os.environ:
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Threads that wait by spinning would take the cores that other ranks compute on.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    # After "--", torchrun does not read anything as an option of its own.
    os.execv(sys.executable, [sys.executable, *launch, "--", *sys.argv])


def on_ranks(main: Callable[[torch.device], int], number: int, gpus: bool = True) -> None:
    """Run ``main(device)`` on ``number`` ranks, and exit with what it returns. Ranks are on GPUs if
    there are enough and ``gpus`` is True, otherwise on the CPU over gloo."""
    start_ranks(number)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if gpus and torch.cuda.device_count() >= world:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    failed = main(device)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


def verdict(claim: str, difference: float, allowed: float) -> int:
    """Print on rank 0 whether all ranks' largest ``difference`` is allowed; returns 0 if so."""
    worst = torch.tensor(difference, dtype=torch.float64)
    worst = torch.nan_to_num(worst, nan=torch.inf)  # a maximum may lose NaN
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    holds = worst.item() <= allowed
    if not dist.is_initialized() or dist.get_rank() == 0:
        how = f"largest difference {worst.item():.1e}, allowed {allowed:.0e}"
        print(f"{'shown' if holds else 'NOT SO'}: {claim} ({how})")
    return int(not holds)
