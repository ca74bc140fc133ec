"""Linear attention over several GPUs, forward and backward, beside one GPU and beside its peers.

    torchrun --nproc-per-node 2 examples/benchmark/linear_attention.py
    python examples/benchmark/linear_attention.py --ranks 2 --device cpu --dtype float32 \
--tokens 256 --runs 3

Contestants, each on contiguous shards of one sequence unless stated otherwise:

    seqshard        the op of this package
    seqshard zigzag the same in attention's order
    library's own   context parallelism of flash-linear-attention; the delta rule only
    all-to-all      tokens become heads and back around one GPU's kernel; what all heads share of
                    q and k is gathered

Share: the time of the fastest call on one GPU with the whole sequence, divided by the number of
GPUs, and by the contestant's time. All results are first compared with those of that call. Then the
contestants take turns, in a different order each round; a run is a few calls in a row, so that the
host stays ahead. Times are medians of runs, of the slowest rank, for one call; the spread is from
the 10th to the 90th percentile of the runs. A run has three parts:

    forward    forward passes alone
    both       a forward and its backward, repeated
    layers     several forwards, then their backwards, as the layers of a model run: ranks wait for
               states once per pass, not once per layer
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":
    # Import from the package above, not from this file's folder.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from shared.launch import count

from benchmark.command import tokens
from benchmark.compete.by_heads import by_heads
from benchmark.compete.checking import both_passes, tolerance
from benchmark.measure.timing import Marks, Runner, take_turns
from benchmark.ranks import Ranks, launch
from benchmark.show.text import markdown, number, percent, short
from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from customized_ops.linear_attention.kernels import fla
from customized_ops.ring_attention import Layout

ALONE = ("library, one GPU", "seqshard, one GPU")
ZIGZAG = "seqshard zigzag"
CONTESTANTS = (*ALONE, "seqshard", ZIGZAG, "all-to-all", "library's own")
Call = Callable[..., Tensor]
HEAD = ("shape", "contestant", "forward ms", "share", "both ms", "share")
HEAD = (*HEAD, "layers ms", "share", "spread of both", "of layers")


@dataclass(frozen=True)
class Shape:
    """Heads of q and k, and of v; dk and dv; whether it is the delta rule."""

    delta: bool
    heads: tuple[int, int]
    dims: tuple[int, int]


SHAPES = {
    "GDN": Shape(True, (32, 32), (128, 128)),
    "GDN 16:32": Shape(True, (16, 32), (128, 128)),  # Qwen3-Next's
    "Mamba-2": Shape(False, (1, 64), (128, 64)),
    "Mamba-2 80": Shape(False, (1, 80), (128, 64)),
}


def library(shape: Shape, **more: Any) -> Call:
    """flash-linear-attention's own call; with gates alone it needs q and k for each head of v."""
    module, name = fla.FUNCTIONS[shape.delta, False]
    function = getattr(import_module(f"fla.ops.{module}"), name)

    def call(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        if not shape.delta:
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return function(q, k, v, *gates, **more)[0]

    return call


def contestants(shape: Shape, total: int, kernel: str, ranks: Ranks) -> Iterator[tuple[str, Call]]:
    """What runs on shards, by name."""
    op = wrap_gated_delta_rule_func if shape.delta else wrap_gated_linear_attn_func

    def ours(group: Any, layout: Layout | None = None) -> Call:
        return lambda *given: op(*given, process_group=group, kernel=kernel, layout=layout)

    yield "seqshard", ours(ranks.group)
    yield ZIGZAG, ours(ranks.group, Layout.zigzag(total, ranks.size))
    installed = ranks.cuda and fla.missing() is None
    if all(heads == 1 or heads % ranks.size == 0 for heads in shape.heads):
        yield "all-to-all", by_heads(library(shape) if installed else ours(None))
    if installed and shape.delta:
        from fla.ops.cp import build_cp_context

        ends = torch.tensor([0, total], dtype=torch.int32)
        context = build_cp_context(
            ends.to(ranks.device), group=ranks.group, cu_seqlens_cpu=ends.long()
        )
        yield "library's own", library(shape, cp_context=context)


def alone(shape: Shape, kernel: str, ranks: Ranks) -> Iterator[tuple[str, Call]]:
    """What runs on one device, by name; the first is the reference for the others."""
    op = wrap_gated_delta_rule_func if shape.delta else wrap_gated_linear_attn_func
    if ranks.cuda and fla.missing() is None:
        yield ALONE[0], library(shape)
    yield ALONE[1], lambda *given: op(*given, kernel=kernel)


def inputs(shape: Shape, total: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v, g, for the delta rule beta, and the gradient of out; for the whole sequence."""
    draw = torch.Generator(device).manual_seed(0)
    (h, hv), (dk, dv) = shape.heads, shape.dims

    def normal(*size: int) -> Tensor:
        return torch.randn(1, total, *size, generator=draw, device=device)

    q, k = (torch.nn.functional.normalize(normal(h, dk), dim=-1).to(dtype) for _ in range(2))
    gates = [-torch.nn.functional.softplus(normal(hv) - 2)]
    if shape.delta:
        gates.append(normal(hv).sigmoid())
    return [q, k, normal(hv, dv).to(dtype), *gates, normal(hv, dv).to(dtype)]


def runner(name: str, call: Call, given: Sequence[Tensor], calls: int) -> Runner:
    """A run: ``calls`` forward passes, as many of both passes, and as many layers."""
    leaves = given[:-1]

    def step(mark: Marks) -> Any:
        mark()
        with torch.no_grad():
            for _ in range(calls):
                call(*leaves)
        mark()
        for _ in range(calls):
            results = both_passes(call, given)
        mark()
        outs = [call(*leaves) for _ in range(calls)]
        while outs:
            results = torch.autograd.grad(outs.pop(), leaves, given[-1])
        mark()
        return results

    return Runner(name, step)


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that require gradients, except for the last."""
    return [x.clone().requires_grad_(n < len(tensors) - 1) for n, x in enumerate(tensors)]


def measure(name: str, total: int, args: argparse.Namespace, ranks: Ranks) -> list[list[str]]:
    """The rows of a shape and length."""
    shape, dtype = SHAPES[name], getattr(torch, args.dtype)
    if ranks.cuda is False:
        shape = Shape(shape.delta, (2 if shape.delta else 1, 4), (8, 8))
    contiguous, zigzag = Layout.contiguous(total, ranks.size), Layout.zigzag(total, ranks.size)
    whole = leaves_of(inputs(shape, total, dtype, ranks.device))
    exact: list[Tensor] = []
    runners, rows = [], []
    title = f"{name}, {short(total)} tokens"
    every = [*alone(shape, args.kernel, ranks), *contestants(shape, total, args.kernel, ranks)]
    for each, call in (each for each in every if each[0] in args.contestants):
        start, layout, given = perf_counter(), zigzag if each == ZIGZAG else contiguous, whole
        if each not in ALONE:
            given = leaves_of([layout.shard(x.detach(), ranks.rank) for x in whole])

        def first(call: Call = call, given: list[Tensor] = given, layout: Layout = layout) -> float:
            found = both_passes(call, given)
            if not exact:
                exact.extend(found)
            of_rank = [layout.shard(x, ranks.rank) for x in exact]
            if given is whole:
                found = [layout.shard(x, ranks.rank) for x in found]
            pairs = zip(found, of_rank, strict=True)
            return float(np.max([((x - y).norm() / y.norm()).item() for x, y in pairs]))

        outcome = ranks.attempt(first)
        error = 0.0 if outcome.failure else float(np.max(ranks.gather(outcome.value)))
        if outcome.failure or not error <= tolerance(dtype):  # NaN is neither
            said = outcome.failure or f"off by {error:.1e} of the first"
            rows.append([title, each, *[""] * (len(HEAD) - 3), said])
        else:
            runners.append(runner(each, call, given, args.calls))
        if ranks.rank == 0:
            took = perf_counter() - start
            print(f"{title}, {each}: {outcome.failure or error} ({took:.1f} s)", flush=True)
    if not {each.name for each in runners} & set(ALONE):
        return rows  # there is no reference for shares
    take_turns(runners, ranks, args.runs, args.lead_ms, lambda turns: turns)
    times = {each.name: slowest(each, args.calls, ranks) for each in runners}
    ideal = np.min([np.median(t, 0) for n, t in times.items() if n in ALONE], 0) / ranks.size
    for each, t in times.items():
        medians = np.median(t, 0)
        shares = [""] * len(ideal) if each in ALONE else map(percent, ideal / medians)
        cells = zip(map(number, medians), shares, strict=True)
        spreads = np.quantile(t[:, 1:], (0.1, 0.9), axis=0).T
        spread = [f"{low:.3g} to {high:.3g}" for low, high in spreads]
        rows.append([title, each, *[c for pair in cells for c in pair], *spread])
    return rows


def slowest(each: Runner, calls: int, ranks: Ranks) -> np.ndarray:
    """[runs, 3]: milliseconds of a call's forward, of both passes, and of a layer, of the slowest
    rank."""
    return np.max(ranks.gather(each.times), 0) / calls


def run(args: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["WORLD_SIZE"])))
    ranks = Ranks(args.device)
    rows = []
    for name in args.shapes:
        for total in args.tokens:
            measured = measure(name, total, args, ranks)
            rows += measured
            if ranks.rank == 0:
                print(markdown(HEAD, measured, 2), flush=True)
            if ranks.cuda:
                torch.cuda.empty_cache()
    if ranks.rank == 0:
        print(f"\n{ranks.size} ranks, {args.dtype}, {args.runs} runs of {args.calls} calls")
        print(markdown(HEAD, rows, 2), flush=True)
    ranks.gather("done")  # no rank leaves before all are done
    ranks.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ranks", type=count, help="start so many processes here, rather than under torchrun")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--shapes", nargs="+", default=["GDN", "Mamba-2"], choices=list(SHAPES))
    add("--tokens", nargs="+", type=tokens, default=[32 * 1024, 128 * 1024], help="32k, 1M")
    add("--kernel", default="auto", help="of seqshard's ops")
    add("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    add("--runs", type=count, default=9)
    add("--calls", type=count, default=4, help="in a row, or layers, in a run")
    add("--lead-ms", type=float, default=0.5, help="a device waits so long before each run")
    args = parser.parse_args(arguments)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 1))
    for total in args.tokens:
        if total % ranks:
            parser.error(f"--tokens {total}: not as many on each of {ranks} ranks")
    here = ALONE if args.device == "cuda" and fla.missing() is None else ALONE[1:]
    if not set(here) & set(args.contestants):
        names = " or ".join(map(repr, here))
        parser.error(f"--contestants: others are a share of {names}, so name that, too")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU; --ranks 2 --device cpu --dtype float32 --tokens 256 tries it out here")
    launch(run, args.ranks, args)


if __name__ == "__main__":
    main()
