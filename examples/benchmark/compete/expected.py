"""Before a case is measured: who takes part, what one GPU computes, how long it will take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmark.cases import Case
from benchmark.contestant import Contestant
from benchmark.show.text import markdown, short, title

OURS = "seqshard"
FAST = 600e12  # FLOP/s per GPU, to estimate what would take too long
LARGE = 2**32  # elements of q that one GPU can hold with everything that both passes make of them
SLOW = 450e12  # FLOP/s per GPU, to estimate how long a case will take: peers are slower
CASE_SECONDS = 5.0  # for compiling, making tensors and checking, about
LONG_RUNS = 3  # timed runs of a long case


def is_long(case: Case, args: argparse.Namespace) -> bool:
    """Whether the whole case would take one GPU too long, or more memory than it has."""
    return not _fits(case, args.single_seconds)


def _fits(case: Case, seconds: float) -> bool:
    elements = case.tokens * case.heads[0] * case.head_dim
    return case.flop / FAST <= seconds and elements <= LARGE


def asked(args: argparse.Namespace, c: Contestant) -> bool:
    """Whether the command line asks for a contestant; a baseline need only not be excluded."""
    wanted = args.contestants is None or c.whole or c.name.startswith(tuple(args.contestants))
    return wanted and not c.name.startswith(tuple(args.without))


def refusal(case: Case, c: Contestant, args: argparse.Namespace, ranks: int) -> str | None:
    """Why a contestant is not measured in a case, or None."""
    why = c.refuses(case, ranks)
    if why is not None or not is_long(case, args):
        return why
    if c.whole:
        return "would take too long, or too much memory"
    if c.name != OURS and args.contestants is None:
        return "left out at this length unless named by --contestants"
    return None


def for_one_gpu(case: Case, args: argparse.Namespace) -> Case:
    """The case reduced to what one GPU can compute in time: fewer key heads, with the same number
    of query heads for each, and then fewer tokens.

    Fewer heads leave pairs and rows unchanged, so times are proportional to heads, for every mask.
    Fewer tokens would be other documents, so packed cases keep theirs if memory suffices.
    """
    most = args.single_seconds / 3
    h, g = case.heads
    for fewer in [n for n in range(g, 0, -1) if g % n == 0]:
        case = replace(case, heads=(h // g * fewer, fewer))
        if _fits(case, most):
            return case
    assert case.make is not None
    tokens, smaller = case.tokens, case
    most = float("inf") if case.packed else most
    while not _fits(smaller, most) and tokens > 1:
        tokens //= 2
        smaller = replace(case.make(tokens), heads=case.heads)
    return smaller


def baseline_runs(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments for running :func:`for_one_gpu`'s case, for which few runs are enough."""
    few = min(args.runs, args.least_runs)
    return argparse.Namespace(**{**vars(args), "runs": few, "single_seconds": float("inf")})


def expected_seconds(
    case: Case, everyone: Sequence[Contestant], args: argparse.Namespace, ranks: int
) -> float:
    """About how many seconds a case takes on GPUs."""
    rounds = 3  # two checks and a run by itself
    able = [c for c in everyone if refusal(case, c, args, ranks) is None]
    alone = case.flop / SLOW
    a_round = sum(alone / (1 if c.whole else ranks) for c in able)
    # This package's ops once more on one device, with a rank's share of the tokens.
    shares = sum(alone / ranks**2 for c in able if c.name.startswith(OURS))
    if is_long(case, args):
        timed = min(LONG_RUNS * a_round, args.case_seconds) if a_round < args.case_seconds else 0.0
        baseline = for_one_gpu(case, args)
        singles = [c for c in everyone if c.whole and c.refuses(baseline, ranks) is None]
        few = baseline_runs(args)
        beside = expected_seconds(baseline, singles, few, ranks) if singles else 0.0
        return CASE_SECONDS + shares + (rounds - 1) * a_round + timed + beside
    timed = max(args.least_runs * a_round, min(args.runs * a_round, args.case_seconds))
    return CASE_SECONDS + shares + rounds * a_round + timed


def listing(
    cases: Sequence[Case], everyone: Sequence[Contestant], args: argparse.Namespace, ranks: int
) -> str:
    """The cases of a run, most important first, with the time that each is expected to take."""
    lines, total = [], 0.0
    for case in cases:
        seconds = expected_seconds(case, everyone, args, ranks)
        total += seconds
        able = sum(refusal(case, c, args, ranks) is None for c in everyone)
        long = f"one GPU: {short_title(for_one_gpu(case, args))}" if is_long(case, args) else ""
        lines.append([title(case), str(able), f"{seconds:.0f}", f"{total:.0f}", long])
    return markdown(["case", "contestants", "s", "s so far", "baseline"], lines, 1)


def short_title(case: Case) -> str:
    """The length and heads of a case."""
    h, g = case.heads
    return f"{short(case.tokens)} tokens, {h}:{g} heads"
