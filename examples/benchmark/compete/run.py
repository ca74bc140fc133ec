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

from benchmark.cases import Case, chosen
from benchmark.compete.contestants import contestants
from benchmark.compete.expected import asked, expected_seconds, listing
from benchmark.compete.match import Match
from benchmark.compete.trace import profile_case
from benchmark.contestant import Choice, Contestant
from benchmark.ranks import Ranks
from benchmark.show.rows import Lines, left_out, versions


def run(args: argparse.Namespace, extra: Sequence[Contestant] = ()) -> None:
    """One rank's part. extra: contestants beside those of the benchmark."""
    end = perf_counter() + args.seconds
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["WORLD_SIZE"])))
    ranks = Ranks(args.device)
    with _compiled_once(ranks):
        everyone = [*contestants(choice(args, ranks.device)), *extra]
        check_names(args, everyone)
        everyone = [c for c in everyone if asked(args, c)]
        lines = Lines(args.json if ranks.rank == 0 else None)
        _begin(args, ranks, everyone, lines)
        cases = chosen(args, ranks.size)
        present = [c for c in everyone if c.missing is None]
        baselines: dict[str, tuple[dict[str, float], str]] = {}
        for case in tqdm(cases, desc="cases", disable=ranks.rank > 0 or None):
            left = ranks.of_first(end - perf_counter())
            if ranks.cuda and left < expected_seconds(case, present, args, ranks.size):
                _say(ranks, left_out(case, f"{args.seconds:.0f} s would not do"))
                lines.add("left out", named(case))
                continue
            match = Match(case, everyone, args, ranks, baselines)
            match.play()
            _say(ranks, match.report())
            for row in match.rows.values():
                lines.row(row)
            if match.refused:
                lines.add("refused", {**named(case), **match.refused})
            if args.profile:
                text, figures = profile_case(match, args.profile)
                _say(ranks, text)
                lines.add("profile", {**named(case), **figures})
            del match
            if ranks.cuda:
                torch.cuda.empty_cache()
        ranks.gather("done")  # no rank leaves before all are done
    ranks.close()


def choice(args: argparse.Namespace, device: torch.device) -> Choice:
    """What the command line says about contestants."""
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None
    return Choice(
        device=device,
        kernel=args.kernel,
        reduce_dtype=reduce_dtype,
        deterministic=args.deterministic,
        fa2=args.fa2,
        single=tuple(args.single),
    )


def check_names(args: argparse.Namespace, everyone: list[Contestant]) -> None:
    """Refuse names that no contestant has.

    Raises:
        SystemExit: a name is unknown; the message lists the contestants.
    """
    for option, names in (("contestants", args.contestants or ()), ("without", args.without)):
        for name in names:
            if not any(c.name.startswith(name) for c in everyone):
                known = ", ".join(c.name for c in everyone)
                raise SystemExit(f"--{option}: no contestant's name starts with {name!r}: {known}")


def named(case: Case) -> dict[str, Any]:
    """Which case a line is about."""
    return {"mask": case.name, "tokens": case.tokens, "heads": list(case.heads)}


def listed(args: argparse.Namespace) -> str:
    """Which cases a run over ``args.ranks`` GPUs has, and how long they will take. Needs no GPU;
    without one, assumes that all contestants are installed."""
    everyone = [c for c in contestants(choice(args, torch.device("cuda"))) if asked(args, c)]
    if torch.cuda.is_available():
        everyone = [c for c in everyone if c.missing is None]
    return listing(chosen(args, args.ranks), everyone, args, args.ranks)


@contextmanager
def _compiled_once(ranks: Ranks) -> Iterator[None]:
    """Inside, the ranks of this run share what flash-attn-4 compiles. Other runs do not, since the
    library does not notice every change of this package's mask functions."""
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
