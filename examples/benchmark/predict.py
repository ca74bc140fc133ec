"""What plans say of cases that nobody has measured here: it needs no GPU."""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from tqdm import tqdm

from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.core.cost import H200

from .account import Account
from .cases import Case, chosen
from .contestant import Choice, alone
from .contestants import ours
from .expected import asked
from .ops import plan_of
from .text import above, markdown, mebibytes, number, percent, title

HEAD = (
    *("case", "contestant", "fwd ms", "bwd ms", "fwd", "bwd", "both", "received fwd MiB"),
    *("above least", "bwd MiB", "pairs above least", "imbalance", "plan ms"),
)


def predicted(args: argparse.Namespace) -> str:
    """A line for each case of a run over ``args.ranks`` GPUs of one host and each layout: times by
    ``core/cost.py``, and shares of what it says one GPU takes, over the number of GPUs. "plan ms"
    is what making the plan took on this machine."""
    everyone = [c for c in ours(Choice(torch.device("cuda"))) if asked(args, c)]
    pairs = [(case, c) for case in chosen(args, args.ranks) for c in everyone]
    lines = [
        [title(case), c.name, *_cells(case, c.layout(case, args.ranks), args)]
        for case, c in tqdm(pairs, desc="plans", leave=False, disable=None)
        if c.refuses(case, args.ranks) is None
    ]
    return markdown(HEAD, lines, 2)


def _cells(case: Case, layout: Layout, args: argparse.Namespace) -> list[str]:
    """Of a case, after its name and the contestant's."""
    dtype = getattr(torch, args.dtype)
    reduce_dtype = getattr(torch, args.reduce_dtype) if args.reduce_dtype else None
    began = perf_counter()
    plan_of(case, layout, H200)
    seconds = perf_counter() - began
    said = Account.of(case, layout, H200, dtype, reduce_dtype)
    one = Account.of(case, alone(case, 1), H200, dtype, reduce_dtype)
    times = [(a.forward, a.backward, a.forward + a.backward) for a in (one, said)]
    shares = [whole / args.ranks / part for whole, part in zip(*times, strict=True)]
    return [
        *(number(said.forward, 4), number(said.backward, 4), *map(percent, shares)),
        *(mebibytes(said.received[0]), above(said.received[0], said.least)),
        *(mebibytes(said.received[1]), above(said.pairs, said.least_pairs)),
        *(f"{said.imbalance:.3f}", number(1e3 * seconds)),
    ]
