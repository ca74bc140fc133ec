"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from shared.launch import count

from benchmark.cases import KINDS, SUITES, K

# Options that the cost model does not know, or that belong to a run.
UNPREDICTED = (
    *("device", "fa2", "kernel", "single", "deterministic", "cuda_graph", "profile", "json"),
    *("plot", "list", "from_json", "runs", "least_runs", "case_seconds", "seconds"),
    *("single_seconds", "lead_ms"),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Attention on several GPUs beside its peers.")
    _add_cases(parser.add_argument)
    _add_runs(parser.add_argument)
    _add_outputs(parser.add_argument)
    args = parser.parse_args(arguments)
    _check(parser, args)
    return args


def _add_cases(add: Callable[..., Any]) -> None:
    """Options: what is measured."""
    add("--ranks", type=count, help="start so many processes here, rather than under torchrun")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--suite", default="causal", choices=list(SUITES))
    add("--kinds", nargs="+", choices=KINDS, help="masks in place of the suite's")
    add("--tokens", nargs="+", type=tokens, help="lengths in place of the suite's; 64k, 1M")
    add("--heads", nargs="+", type=heads, metavar="Q:KV", help="in place of the suite's; 32:8")
    add("--head-dim", type=count, default=128)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--contestants", nargs="+", metavar="NAME", help="only those whose names start so")
    add("--without", nargs="+", default=(), metavar="NAME", help="none whose names start so")
    add("--fa2", action="store_true", help="the peers with torch's FlashAttention-2 too")
    add("--kernel", default="auto", help="of seqshard's ops")
    add(
        "--single",
        nargs="+",
        default=["auto", "te"],
        help="kernels of the op on one GPU, beside the libraries' own calls",
    )
    add("--reduce-dtype", choices=["bfloat16", "float16", "float32"], help="of seqshard's ops")
    add("--deterministic", action="store_true", help="seqshard's ops, and its graphs' gradients")
    add("--cuda-graph", action="store_true", help="seqshard as one CUDA graph too")
    add(
        "--document-multiple",
        type=count,
        default=16,
        help="documents' lengths are a multiple of it; peers that cut each document need 2 x ranks",
    )
    add("--seed", type=int, default=0)


def _add_runs(add: Callable[..., Any]) -> None:
    """Options: how often, and for how long."""
    add("--runs", type=count, default=15, help="runs behind a median")
    add("--least-runs", type=count, default=5, help="where they would take --case-seconds")
    add("--case-seconds", type=float, default=25, help="most for the timed runs of a case")
    add("--seconds", type=float, default=360, help="most for everything; the rest is left out")
    add(
        "--single-seconds",
        type=float,
        default=3,
        help="most for one run on one GPU; beyond it"
        " the baseline is that of fewer heads, then of fewer tokens, by FLOP",
    )
    add(
        "--lead-ms",
        type=float,
        default=0.5,
        help="a device waits so long before each run, in"
        " which its host queues calls; 0 shows what the host costs",
    )


def _add_outputs(add: Callable[..., Any]) -> None:
    """Options: what is printed, drawn and saved."""
    add("--json", type=Path, metavar="FILE", help="write every row there, one JSON object a line")
    add("--plot", type=Path, metavar="FILE", help="draw shares, and predictions, as a PNG")
    add(
        "--from-json",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: medians over runs that --json wrote before",
    )
    add("--markdown", action="store_true", help="print --from-json's runs as tables")
    add("--list", action="store_true", help="only say which cases, and about how long they take")
    add(
        "--predict",
        action="store_true",
        help="only say what plans do, and how long by the cost model",
    )
    add("--profile", type=Path, metavar="DIR", help="trace one run of seqshard for each case")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    for name in ("list", "predict"):
        if getattr(args, name) and not args.ranks:
            parser.error(f"--{name} goes with --ranks")
    if args.predict:
        for name in UNPREDICTED:
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--predict takes no --{name.replace('_', '-')}")
        if args.dtype == "float32":
            parser.error("--predict knows the rates of bfloat16 and float16")
    if args.from_json and not (args.plot or args.markdown):
        parser.error("--from-json goes with --plot, --markdown or both")
    for path in args.from_json or ():
        if not path.is_file():
            parser.error(f"--from-json: there is no file {path}")
    if args.markdown and not args.from_json:
        parser.error("--markdown goes with --from-json")
    if args.plot and not (args.json or args.from_json):
        parser.error("--plot draws what --json writes: give both")
    idle = args.from_json or args.list or args.predict
    if args.device == "cuda" and not idle and not torch.cuda.is_available():
        parser.error(
            "no CUDA device; --device cpu --dtype float32 --tokens 256 --heads 4:2 --head-dim 16 "
            "tries it out on this machine"
        )


def tokens(text: str) -> int:
    """A length such as 4096, 64k or 1M."""
    units = {"k": K, "m": K * K}
    unit = units.get(text[-1:].lower())
    return count(text) if unit is None else count(text[:-1]) * unit


def heads(text: str) -> tuple[int, int]:
    """Heads of q and of k and v, such as 32:8."""
    parts = [count(part) for part in text.split(":")]
    if len(parts) != 2 or parts[0] % parts[1]:
        raise argparse.ArgumentTypeError(f"{text} is not as 32:8, the second dividing the first")
    return parts[0], parts[1]
