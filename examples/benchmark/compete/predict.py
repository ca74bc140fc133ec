"""What plans predict for cases that were not measured here; needs no GPU."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

import torch
from tqdm import tqdm

from benchmark.cases import Case, chosen
from benchmark.compete.contestants import ours
from benchmark.compete.expected import asked
from benchmark.contestant import Choice, alone
from benchmark.measure.account import Account
from benchmark.ops import plan_of
from benchmark.show.text import above, markdown, mebibytes, number, percent, title
from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.core.cost import H200

HEAD = (
    *("case", "contestant", "fwd ms", "bwd ms", "fwd", "bwd", "both", "received fwd MiB"),
    *("above least", "bwd MiB", "pairs above least", "imbalance", "plan ms"),
)


def predicted(args: argparse.Namespace) -> str:
    """A line for each layout and each case of a run over ``args.ranks`` GPUs of one host. Times are
    by ``core/cost.py``; shares are of the time it predicts for one GPU, over the number of GPUs.
    Bytes and pairs are of the rank that has most. "plan ms" is what this machine took to make the
    plan and a rank's part of it; what an earlier line has made is not made again.

    Raises:
        SystemExit: no contestant is left.
    """
    everyone = [c for c in ours(Choice(torch.device("cuda"))) if asked(args, c)]
    if not everyone:
        sys.exit("--predict knows the plans of seqshard and of seqshard contiguous only")
    lines = []
    for case in tqdm(chosen(args, args.ranks), desc="cases", leave=False, disable=None):
        one = _account(case, alone(case, 1), args)
        for c in everyone:
            if c.refuses(case, args.ranks) is None:
                cells = _cells(case, c.layout(case, args.ranks), one, args)
                lines.append([title(case), c.name, *cells])
    return markdown(HEAD, lines, 2)


def _account(case: Case, layout: Layout, args: argparse.Namespace) -> Account:
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None
    return Account.of(case, layout, H200, getattr(torch, args.dtype), reduce_dtype)


def _cells(case: Case, layout: Layout, one: Account, args: argparse.Namespace) -> list[str]:
    """A line's cells after the names of case and contestant. one: the account of one GPU."""
    began = perf_counter()
    plan_of(case, layout, H200).rank(0)
    seconds = perf_counter() - began
    said = _account(case, layout, args)
    times = [(a.forward, a.backward, a.forward + a.backward) for a in (one, said)]
    shares = [whole / args.ranks / part for whole, part in zip(*times, strict=True)]
    return [
        *(number(said.forward, 4), number(said.backward, 4), *map(percent, shares)),
        *(mebibytes(said.received[0]), above(said.received[0], said.least)),
        *(mebibytes(said.received[1]), above(said.pairs, said.least_pairs)),
        *(f"{said.imbalance:.3f}", number(1e3 * seconds)),
    ]
