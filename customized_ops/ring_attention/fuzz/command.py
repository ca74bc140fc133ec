"""The command ``fuzz``: a number of random trials, or as many as fit in a given time."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from itertools import islice

import torch
from tqdm import tqdm

from . import draw, engine
from .kinds import KINDS
from .shrink import shrunk
from .trial import Trial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--cases", type=int, default=1000, metavar="N", help="trials in all (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="S", help="of what is drawn (default: %(default)s)")
    add("--kind", choices=KINDS, action="append", help="of calls; again for another (default: all)")
    said = "start no trial after so many (default: no limit)"
    add("--seconds", type=float, metavar="T", help=said)


def fuzz(options: argparse.Namespace) -> str:
    """Run trials until one fails, each as soon as it is drawn.

    Returns: what was tried, where nothing failed.
    Raises:
        SystemExit: a trial failed; carries the smallest script found that repeats the failure.
    """
    started = time.monotonic()
    if options.cases < 1:
        raise ValueError(f"--cases must be 1 or more, got {options.cases}")
    torch.set_num_threads(1)  # ranks are threads
    drawn = islice(draw.trials(options.seed, tuple(options.kind or KINDS)), options.cases)
    tried = 0
    with closing(engine.Engine()) as layers:

        def failure_of(trial: Trial) -> str:
            return layers.failure(trial) if trial.policy else trial.failure()

        for trial in tqdm(drawn, total=options.cases, desc="fuzz", disable=None):
            failure = failure_of(trial)
            if failure:
                small, said = shrunk(trial, failure, failure_of)
                what = f"trial {tried} of seed {options.seed} failed: {failure}"
                raise SystemExit(f"{what}\n\n{small.script(said)}")
            tried += 1
            if options.seconds is not None and time.monotonic() - started > options.seconds:
                break
    left = f" of {options.cases:,}: the time was over" if tried < options.cases else ""
    return f"{tried:,} trials{left}, seed {options.seed}: none failed"
