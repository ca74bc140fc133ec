"""Training on packed documents whose lengths are new with every step, beside lengths seen before.

    torchrun --nproc-per-node 2 examples/benchmark/packed_training.py
    python examples/benchmark/packed_training.py --ranks 2 --device cpu --tokens 256 --layers 2 \
--dim 32 --heads 4:2 --hidden 48 --vocab 300 --batches 3

A Llama, of 1B shape by default, is trained in three ways: its attention is called with a group,
``parallelize`` cuts it, or it is transformers' own model with ``shard_batch``. A list of batches,
drawn from the lengths of a long-context corpus, is run twice: "new", where workers of a DataLoader
plan ahead, and "known", the same batches again. As in training, the host does not wait for steps. A
step is forward, backward, gradients added up over ranks and a fused AdamW; parameters are fp32, the
rest bf16. Times are of the slowest rank, the median and the span of the rounds.

All three start from the same weights. If their first losses differ, the program exits with an
error.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from shared.llama import LlamaConfig

from benchmark.command import tokens as counted
from benchmark.documents import document_bounds
from benchmark.ranks import Ranks, launch
from benchmark.show.text import markdown
from benchmark.train.options import LOSSES_APART, add_llama, llama_config
from benchmark.train.packed_routes import ROUTES, Route, Step
from customized_ops.ring_attention import (
    PackDocuments,
    PackedBatch,
    compiled_kernels,
    group_costs,
    packed_batches,
    warm_up,
)

COLUMNS = (
    "",
    "known, ms a step",
    "new, ms a step",
    "new, tokens/s",
    "new / known",
    "compiled",
    "GiB",
)


class Documents(torch.utils.data.Dataset[list[np.ndarray]]):
    """Batches of documents, each a list of rows of tokens, the same on every rank."""

    def __init__(self, count: int, tokens: int, vocab: int, seed: int) -> None:
        self.count, self.tokens, self.vocab, self.seed = count, tokens, vocab, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> list[np.ndarray]:
        bounds = document_bounds(self.tokens, self.seed + n)
        ids = np.random.default_rng(self.seed + n).integers(0, self.vocab, self.tokens)
        return np.split(ids, bounds[1:-1])


@dataclass(frozen=True)
class Found:
    """What one route took: seconds per step of known and of new batches, for each round; the other
    fields are as at its end."""

    known: list[float]
    new: list[float]
    first_loss: float
    compiled: int
    peak: int


def measure(route: Route, config: LlamaConfig, args: argparse.Namespace, ranks: Ranks) -> Found:
    """Measure one route, from scratch."""
    dtype = getattr(torch, args.dtype)
    sizes = {"heads": (config.heads, config.kv_heads), "head_dim": config.head_dim}
    if ranks.cuda:
        where = {"dtype": dtype, "device": ranks.device, "process_group": ranks.group}
        warm_up(args.tokens, **sizes, **where)
    attends = {**sizes, "whole": route.whole, "costs": group_costs(ranks.group)}
    pack = PackDocuments(ranks.size, ranks.rank, **attends)

    def new(seed: int, count: int) -> Iterator[PackedBatch]:
        drawn = Documents(count, args.tokens, config.vocab, seed)
        how = {"batch_size": None, "num_workers": 2, "pin_memory": ranks.cuda}
        made = DataLoader(drawn, collate_fn=pack, **how)
        own = {"ranks": pack.ranks, "rank": pack.rank, "layout": pack.layout}
        for batch in packed_batches(made, **own, **attends):
            yield batch.to(ranks.device)

    [first] = new(0, 1)
    step, layout = route.make(config, dtype, ranks, first)
    pack = replace(pack, layout=layout)
    [first] = new(0, 1)
    loss = sum(ranks.gather(float(step(first))))
    _seconds(step, new(1, 4), ranks)
    compiled, times = compiled_kernels(), []
    if ranks.cuda:
        torch.cuda.reset_peak_memory_stats()
    for turn in range(args.rounds):
        seen: list[PackedBatch] = []
        loader = new(100 + turn * args.batches, args.batches + 1)
        step(next(loader))  # once the workers have started
        fresh = _seconds(step, (seen.append(each) or each for each in loader), ranks)
        times.append((_seconds(step, seen, ranks), fresh))
    slowest = [
        [max(each) for each in zip(*ranks.gather(t), strict=True)] for t in zip(*times, strict=True)
    ]
    peak = torch.cuda.max_memory_allocated() if ranks.cuda else 0
    return Found(*slowest, loss, compiled_kernels() - compiled, peak)


def _seconds(step: Step, batches: Iterable[PackedBatch], ranks: Ranks) -> float:
    """Seconds per step."""
    ranks.together()
    ranks.wait()
    start, count = perf_counter(), 0
    for batch in batches:
        step(batch)
        count += 1
    ranks.wait()
    return (perf_counter() - start) / count


def run(args: argparse.Namespace) -> None:
    """Run on every rank."""
    ranks = Ranks(args.device)
    config = llama_config(args)
    rows, losses = [], []
    for name in args.routes or ROUTES:
        outcome = ranks.attempt(lambda name=name: measure(ROUTES[name], config, args, ranks))
        found = outcome.value
        if found is None:
            rows.append([name, str(outcome.failure)[:300], *[""] * (len(COLUMNS) - 2)])
        else:
            losses.append(found.first_loss)
            rows.append([name, *_cells(found, args.tokens)])
        if ranks.rank == 0:
            print(rows[-1], flush=True)
        outcome = found = None
        gc.collect()
        if ranks.cuda:
            torch.cuda.empty_cache()
    if ranks.rank == 0:
        print(f"{args.tokens:,} tokens of packed documents a step, {ranks.size} ranks")
        print(markdown(COLUMNS, rows, 1))
    ranks.close()
    if len(losses) < len(rows) or max(losses) - min(losses) > LOSSES_APART:
        sys.exit(f"a route failed, or losses of the first step differ: {losses}")


def _cells(found: Found, tokens: int) -> list[str]:
    ratios = [new / known for known, new in zip(found.known, found.new, strict=True)]
    cells = [
        f"{np.median(each):{form}} ({min(each):{form}} to {max(each):{form}})"
        for each, form in (
            ([1e3 * s for s in found.known], ".1f"),
            ([1e3 * s for s in found.new], ".1f"),
            ([tokens / s for s in found.new], ",.0f"),
            (ratios, ".3f"),
        )
    ]
    return [*cells, str(found.compiled), f"{found.peak / 2**30:.1f}"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=counted, default=32768, help="of a batch, over all ranks")
    add("--routes", nargs="+", choices=list(ROUTES))
    add("--batches", type=int, default=20, help="of a list")
    add("--rounds", type=int, default=3)
    add_llama(add)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; with --device cpu and smaller sizes it runs on a CPU")
    launch(run, args.ranks, args)


if __name__ == "__main__":
    main()
