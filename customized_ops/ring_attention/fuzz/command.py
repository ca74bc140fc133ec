"""The command ``fuzz``: so many random trials, or as many as a time allows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain
from random import Random

import torch
from tqdm import tqdm

from . import draw, engine
from .kinds import KINDS
from .shrink import shrunk
from .trial import Trial

ENGINE_SHARE = 50  # one in so many trials is of parallelize
ENGINE_RANKS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="trials in all")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of what is drawn")
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="of calls; again for another (default: all)"
    )
    parser.add_argument("--seconds", type=float, metavar="T", help="start no trial after so many")


def fuzz(options: argparse.Namespace) -> str:
    """Run trials until one fails.

    Returns: what was tried, where nothing failed.
    Raises:
        SystemExit: a trial failed; with the smallest script that repeats it.
    """
    if options.cases < 1:
        raise ValueError(f"--cases must be 1 or more, got {options.cases}")
    torch.set_num_threads(1)  # ranks are threads
    random = Random(options.seed)
    kinds = tuple(options.kind or KINDS)
    of_layers = [kind for kind in kinds if kind in draw.LAYERS]
    of_engine = options.cases // ENGINE_SHARE if of_layers else 0
    calls = [draw.trial(random, kinds) for _ in range(options.cases - of_engine)]
    layers = [draw.layer(random, ENGINE_RANKS, of_layers) for _ in range(of_engine)]
    tried = 0
    for trial, failure in _within(options.seconds, _results(calls, layers), options.cases):
        if failure:
            raise SystemExit(_report(trial, failure, options.seed, tried))
        tried += 1
    left = f" of {options.cases}: the time was over" if tried < options.cases else ""
    return f"{tried:,} trials{left}, seed {options.seed}: none failed"


def _results(calls: list[Trial], layers: list[Trial]) -> Iterator[tuple[Trial, str]]:
    """Each trial with what is wrong with it; those of ``parallelize``, which start processes, are
    last."""
    of_calls = ((trial, trial.failure()) for trial in calls)
    of_layers = zip(layers, engine.run(layers), strict=True) if layers else ()
    return chain(of_calls, of_layers)


def _within(
    seconds: float | None, results: Iterator[tuple[Trial, str]], cases: int
) -> Iterator[tuple[Trial, str]]:
    started = time.monotonic()
    for result in tqdm(results, total=cases, desc="fuzz", disable=None):
        yield result
        if seconds is not None and time.monotonic() - started > seconds:
            return


def _report(trial: Trial, failure: str, seed: int, tried: int) -> str:
    """The failure of a trial made small, and the script."""
    if trial.policy:
        smaller = shrunk(trial, failure, lambda one: next(iter(engine.run([one]))))
    else:
        smaller = shrunk(trial, failure)
    return f"trial {tried} of seed {seed} failed: {failure}\n\n{smaller[0].script(smaller[1])}"
