"""The command line of the benchmark of kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from shared.launch import count

from customized_ops.ring_attention.core.kernels import KERNELS
from speed.masks import masks

OP_TOKENS = 8192  # most tokens of the public op, by default


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments. Exits if nothing, or something else, would be measured."""
    parser = argparse.ArgumentParser(description="Speed of attention kernels.")
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add(
        "--kernels",
        nargs="+",
        choices=list(KERNELS),
        default=[name for name in KERNELS if name != "reference"],
    )
    add("--tokens", nargs="+", type=count, default=[2048, 8192, 32768])
    add(
        "--op-tokens",
        type=count,
        help=f"length of the last table, causal; default: the largest of --tokens up to {OP_TOKENS}"
        ", else the smallest",
    )
    heads = {"nargs": 2, "type": count, "metavar": ("Q", "KV")}
    add("--heads", default=[32, 8], help="of q, of k and v", **heads)
    add("--head-dim", type=count, default=128)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--masks", nargs="+", help="only masks that start so, as in: causal packed")
    add("--runs", type=count, default=20, help="most runs behind a median")
    add("--seed", type=int, default=0, help="of the documents' lengths")
    add("--seconds", type=float, default=180, help="most for everything")
    add("--row-seconds", type=float, default=90, help="most for a row")
    add(
        "--run-seconds",
        type=float,
        default=1,
        help="leave out where a forward and backward is expected to take longer",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--speeds", action="store_true", help="print them as a Python literal too; GPUs only")
    args = parser.parse_args(arguments)
    try:
        _check(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.op_tokens is None:
        args.op_tokens = max((n for n in args.tokens if n <= OP_TOKENS), default=min(args.tokens))
    return args


def _check(args: argparse.Namespace) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device; --device cpu --tokens 512 tries it out on this machine")
    if args.device == "cpu" and args.speeds:
        raise ValueError("--speeds: the table is of GPUs; leave it out with --device cpu")
    known = dict.fromkeys(m.name.split(",")[0] for n in args.tokens for m in masks(n, args.seed))
    for start in args.masks or ():
        if not any(name.startswith(start) for name in known):
            raise ValueError(f"--masks: none starts with {start!r}; there are {', '.join(known)}")
    if args.op_tokens and args.masks and not "causal".startswith(tuple(args.masks)):
        raise ValueError("--op-tokens: the op is measured with the mask causal; add it to --masks")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json: there is no folder {args.json.parent}")
    if args.json:
        args.json.write_text("")
