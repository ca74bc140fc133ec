"""Linear attention over several GPUs, forward and backward, beside one GPU and beside its peers.

    torchrun --nproc-per-node 2 examples/benchmark/linear_attention.py
    python examples/benchmark/linear_attention.py --ranks 2 --device cpu --dtype float32 \
--tokens 256 --runs 3

Contestants, each on contiguous shards of one sequence:

    seqshard        the op of this package
    library's own   context parallelism of flash-linear-attention; the delta rule only
    all-to-all      tokens become heads and back around one GPU's kernel; what all heads share of
                    q and k is gathered

Share: the time of the fastest call on one GPU with the whole sequence, over the number of GPUs,
over the contestant's. All are first compared with that call, then take turns, in another order each
round; a run is a few calls in a row, so that the host keeps ahead. Times are medians of runs, of
the slowest rank, for one call; the spread is from the first to the ninth tenth of the runs. A run
is forward passes alone, then forward and backward passes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":
    # The folder of this file is no place to import from: the package above it is.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from launch import count

from benchmark.command import tokens
from benchmark.compete.checking import tolerance
from benchmark.measure.timing import Marks, Runner, take_turns
from benchmark.ranks import Ranks, spawn
from benchmark.show.text import markdown, number, percent, short
from customized_ops.linear_attention import (
    wrap_gated_delta_rule_func,
    wrap_gated_linear_attn_func,
)
from customized_ops.linear_attention.kernels import fla
from customized_ops.ring_attention import Layout

Call = Callable[..., Tensor]
HEAD = ("shape", "contestant", "forward ms", "share", "both ms", "share", "spread of both")


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


class Heads(torch.autograd.Function):
    """[1, own tokens, heads, ...] to [1, all tokens, own heads, ...]; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: bool) -> Tensor:
        ctx.back, ranks = back, dist.get_world_size()
        parts = x.unflatten(1, (ranks, -1)) if back else x.unflatten(2, (ranks, -1)).movedim(2, 1)
        sent = parts.squeeze(0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return (received.movedim(0, 1).flatten(1, 2) if back else received.flatten(0, 1))[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Heads.forward(ctx, grads[0], not ctx.back), None


class Gather(torch.autograd.Function):
    """[1, own tokens, ...] of all ranks; its gradient is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.new_empty(dist.get_world_size() * x.shape[1], *x.shape[2:])
        dist.all_gather_into_tensor(whole, x.squeeze(0).contiguous())
        return whole[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        whole = grads[0].squeeze(0).contiguous()
        own = torch.empty_like(whole[: len(whole) // dist.get_world_size()])
        dist.reduce_scatter_tensor(own, whole)
        return own[None]


def by_heads(whole: Call) -> Call:
    """All-to-all around a call with all tokens and some heads."""

    def call(*given: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        moved = [Gather.apply(x) if x.shape[2] < ranks else Heads.apply(x, False) for x in given]
        return Heads.apply(whole(*moved), True)

    return call


def library(shape: Shape, **more: Any) -> Call:
    """flash-linear-attention's own call; it has q and k for each head of gates alone."""
    name = fla.FUNCTIONS[shape.delta, False]
    function = getattr(__import__(f"fla.ops.{name[0]}", fromlist=["_"]), name[1])

    def call(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        if not shape.delta:
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return function(q, k, v, *gates, **more)[0]

    return call


def contestants(shape: Shape, total: int, kernel: str, ranks: Ranks) -> Iterator[tuple[str, Call]]:
    """What runs on shards, by name."""
    op = wrap_gated_delta_rule_func if shape.delta else wrap_gated_linear_attn_func

    def ours(group: Any) -> Call:
        return lambda *given: op(*given, process_group=group, kernel=kernel)

    yield "seqshard", ours(ranks.group)
    installed = ranks.cuda and fla.missing() is None
    yield "all-to-all", by_heads(library(shape) if installed else ours(None))
    if installed and shape.delta:
        from fla.ops.cp import build_cp_context

        ends = torch.tensor([0, total], dtype=torch.int32)
        context = build_cp_context(
            ends.to(ranks.device), group=ranks.group, cu_seqlens_cpu=ends.long()
        )
        yield "library's own", library(shape, cp_context=context)


def alone(shape: Shape, kernel: str, ranks: Ranks) -> Iterator[tuple[str, Call]]:
    """What runs on one device, by name; the first is what others are compared with."""
    op = wrap_gated_delta_rule_func if shape.delta else wrap_gated_linear_attn_func
    if ranks.cuda and fla.missing() is None:
        yield "library, one GPU", library(shape)
    yield "seqshard, one GPU", lambda *given: op(*given, kernel=kernel)


def inputs(shape: Shape, total: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v, g, beta of the delta rule, and the gradient of out; of the whole sequence."""
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
    """A run: so many forward passes, then so many of both."""
    leaves = given[:-1]

    def step(mark: Marks) -> Any:
        mark()
        with torch.no_grad():
            for _ in range(calls):
                call(*leaves)
        mark()
        for _ in range(calls):
            results = both(call, given)
        mark()
        return results

    return Runner(name, step)


def both(call: Call, given: Sequence[Tensor]) -> list[Tensor]:
    """out, and the gradients of all inputs."""
    *leaves, dout = given
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies whose gradients are asked for, but for the last."""
    return [x.clone().requires_grad_(n < len(tensors) - 1) for n, x in enumerate(tensors)]


def measure(name: str, total: int, args: argparse.Namespace, ranks: Ranks) -> list[list[str]]:
    """The rows of a shape and length."""
    shape, dtype = SHAPES[name], getattr(torch, args.dtype)
    if ranks.cuda is False:
        shape = Shape(shape.delta, (2 if shape.delta else 1, 4), (8, 8))
    layout = Layout.contiguous(total, ranks.size)
    whole = leaves_of(inputs(shape, total, dtype, ranks.device))
    shards = leaves_of([layout.shard(x.detach(), ranks.rank) for x in whole])
    exact: list[Tensor] = []
    runners, rows = [], []
    title = f"{name}, {short(total)} tokens"
    every = [(n, call, whole) for n, call in alone(shape, args.kernel, ranks)]
    every += [(n, call, shards) for n, call in contestants(shape, total, args.kernel, ranks)]
    for each, call, given in every:

        def first(call: Call = call, given: list[Tensor] = given) -> float:
            found = both(call, given)
            if not exact:
                exact.extend(layout.shard(x, ranks.rank) for x in found)
            if given is whole:
                found = [layout.shard(x, ranks.rank) for x in found]
            pairs = zip(found, exact, strict=True)
            return max(((x - y).norm() / y.norm()).item() for x, y in pairs)

        outcome = ranks.attempt(first)
        error = 0.0 if outcome.failure else max(ranks.gather(outcome.value))
        if outcome.failure or error > tolerance(dtype):
            said = outcome.failure or f"off by {error:.1e} of the first"
            rows.append([title, each, *[""] * (len(HEAD) - 3), said])
        else:
            runners.append(runner(each, call, given, args.calls))
    take_turns(runners, ranks, args.runs, args.lead_ms, lambda turns: turns)
    times = {each.name: slowest(each, args.calls, ranks) for each in runners}
    ideal = np.min([np.median(t, 0) for n, t in times.items() if "one GPU" in n], 0) / ranks.size
    for each, t in times.items():
        (forward, both_ms), (low, high) = np.median(t, 0), np.quantile(t[:, 1], (0.1, 0.9))
        shares = ["", ""] if "one GPU" in each else map(percent, ideal / (forward, both_ms))
        cells = zip(map(number, (forward, both_ms)), shares, strict=True)
        rows.append([title, each, *[c for pair in cells for c in pair], f"{low:.3g} to {high:.3g}"])
    return rows


def slowest(each: Runner, calls: int, ranks: Ranks) -> np.ndarray:
    """[runs, 2]: milliseconds of a call's forward, and of both passes, of the slowest rank."""
    return np.max(ranks.gather(each.times), 0) / calls


def run(args: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["WORLD_SIZE"])))
    ranks = Ranks(args.device)
    rows = []
    for total in args.tokens:
        for name in args.shapes:
            rows += measure(name, total, args, ranks)
            if ranks.rank == 0:
                print(markdown(HEAD, rows[-6:], 2), flush=True)
            if ranks.cuda:
                torch.cuda.empty_cache()
    if ranks.rank == 0:
        print(f"\n{ranks.size} ranks, {args.dtype}, {args.runs} runs of {args.calls} calls")
        print(markdown(HEAD, rows, 2), flush=True)
    ranks.gather("done")  # none leaves before all are
    ranks.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--ranks", type=count, help="start so many processes here, rather than under torchrun")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--shapes", nargs="+", default=["GDN", "Mamba-2"], choices=list(SHAPES))
    add("--tokens", nargs="+", type=tokens, default=[32 * 1024, 128 * 1024], help="32k, 1M")
    add("--kernel", default="auto", help="of seqshard's ops")
    add("--runs", type=count, default=9)
    add("--calls", type=count, default=4, help="in a row, in a run")
    add("--lead-ms", type=float, default=0.5, help="a device waits so long before each run")
    args = parser.parse_args(arguments)
    if args.ranks:
        spawn(run, args.ranks, args)
    elif "WORLD_SIZE" in os.environ:
        run(args)
    else:
        sys.exit("start it with torchrun --nproc-per-node N, or say --ranks N")


if __name__ == "__main__":
    main()
