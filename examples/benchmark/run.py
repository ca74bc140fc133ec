"""A run: case after case, in one process group."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from .cases import Case, chosen
from .contestants import Choice, Contestant, contestants
from .match import Match
from .ranks import Ranks
from .rows import Lines, left_out, versions
from .trace import profile_case

SLOW = 400e12  # FLOP a second and GPU, to guess how long a case will take
CASE_SECONDS = 8.0  # of compiling and checking, about


def run(args: argparse.Namespace, extra: Sequence[Contestant] = ()) -> None:
    """One rank's part. extra: contestants beside those of the benchmark."""
    end = perf_counter() + args.seconds
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["WORLD_SIZE"])))
    ranks = Ranks(args.device)
    with _compiled_once(ranks):
        everyone = selected(args, contestants(choice(args, ranks.device, extra)))
        lines = Lines(args.json if ranks.rank == 0 else None)
        _begin(args, ranks, everyone, lines)
        cases = chosen(
            args.suite, args.tokens, args.heads, args.head_dim, args.seed, args.document_multiple
        )
        for case in tqdm(cases, desc="cases", disable=ranks.rank > 0 or None):
            left = ranks.of_first(end - perf_counter())
            if left < expected_seconds(case, len(everyone), args, ranks):
                _say(ranks, left_out([case], f"{args.seconds:.0f} s would not do"))
                lines.add("left out", {"mask": case.name, "tokens": case.tokens})
                continue
            match = Match(case, everyone, args, ranks)
            match.play()
            _say(ranks, match.report())
            for row in match.rows:
                lines.row(row)
            if match.refused:
                lines.add("refused", {"mask": case.name, "tokens": case.tokens, **match.refused})
            if args.profile:
                summary = profile_case(match, args.profile)
                _say(ranks, summary.text)
                lines.add("profile", {"mask": case.name, "tokens": case.tokens, **summary.figures})
            del match
            if ranks.cuda:
                torch.cuda.empty_cache()
        ranks.gather("done")  # none leaves before all are
    ranks.close()


def choice(args: argparse.Namespace, device: torch.device, extra: Sequence[Contestant]) -> Choice:
    """What the command line says of contestants."""
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None
    return Choice(
        device=device,
        kernel=args.kernel,
        reduce_dtype=reduce_dtype,
        deterministic=args.deterministic,
        fa2=args.fa2,
        single=tuple(args.single),
        extra=tuple(extra),
    )


def selected(args: argparse.Namespace, everyone: list[Contestant]) -> list[Contestant]:
    """Those asked for; baselines always, unless they are asked out."""

    def asked(c: Contestant) -> bool:
        wanted = args.contestants is None or c.whole or c.name.startswith(tuple(args.contestants))
        return wanted and not c.name.startswith(tuple(args.without))

    return [c for c in everyone if asked(c)]


def expected_seconds(case: Case, count: int, args: argparse.Namespace, ranks: Ranks) -> float:
    """Of a case, about, with so many contestants."""
    if not ranks.cuda:
        return 0.0
    alone = case.flop / SLOW
    if alone > args.single_seconds:  # one run beside a few checks, of the few that are kept
        return CASE_SECONDS + 4 * alone / ranks.size
    a_round = 3 * alone + count * alone / ranks.size
    timed = max(args.least_runs * a_round, min(args.runs * a_round, args.case_seconds))
    return CASE_SECONDS + 3 * a_round + timed


@contextmanager
def _compiled_once(ranks: Ranks) -> Iterator[None]:
    """What flash-attn-4 compiles is shared by the ranks of this run, and by no other run: the
    library does not see every change of this package's mask functions."""
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    if name in os.environ or not ranks.cuda:
        yield
        return
    folder = ranks.of_first(tempfile.mkdtemp() if ranks.rank == 0 else None)
    os.environ[name] = folder
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    try:
        yield
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _begin(
    args: argparse.Namespace, ranks: Ranks, everyone: list[Contestant], lines: Lines
) -> None:
    found = versions(ranks.cuda)
    _say(ranks, ", ".join(f"{name} {value}" for name, value in found.items()))
    _say(ranks, f"{ranks.size} ranks, {args.dtype}, head dim {args.head_dim}, suite {args.suite}")
    for c in everyone:
        if c.missing:
            _say(ranks, f"not measured: {c.name}: {c.missing}")
    shown: dict[str, Any] = {
        name: value if isinstance(value, (int, float, list, type(None))) else str(value)
        for name, value in vars(args).items()
    }
    lines.add("run", {"arguments": shown, "versions": found, "ranks": ranks.size})


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        tqdm.write(text)
