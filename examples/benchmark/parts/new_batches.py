"""What new document lengths cost a training step on GPUs, beside lengths that were seen before.

    torchrun --nproc-per-node 2 examples/benchmark/parts/new_batches.py
    python examples/benchmark/parts/new_batches.py --ranks 8
    python examples/benchmark/parts/new_batches.py --device cpu --tokens 256 --heads 4 2 --dim 16

A step is the forward and backward of some attention ops. A list of batches, drawn from the lengths
of a long-context corpus, comes from a DataLoader, "ahead", whose workers plan it while the GPU
works, and then from the DataLoader once more, "again"; both include the cost of receiving batches
from workers. Another list is run as "new", where each step makes layout and plan itself, again as
"known", and after a third time as "replayed". With four ops or more, as by default, calls are
recorded in the first op of a batch and replayed from then on. As in training, the host does not
wait for steps. Times are milliseconds per step, the median and the span of the rounds;
"ahead - again" is the difference within a round. "slowest" is the longest time of the host in a
step of an "ahead" list, "ops 1 2 3" what the forwards of the first ops of a step took it there,
medians in microseconds. "compiled" counts kernels that were compiled after ``warm_up``, "syncs" how
often the host waited for the GPU in a step. Outside torchrun, with ``--ranks``, this is one rank
that computes as if it had peers: on a GPU as if they were GPUs of its host.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.path.insert(1, str(Path(__file__).parents[2]))

from benchmark.documents import document_bounds
from speed.absent_peers import AbsentPeers

from customized_ops.ring_attention import (
    PackDocuments,
    PackedBatch,
    compiled_kernels,
    group_costs,
    warm_up,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm
from customized_ops.ring_attention.op.bound import MOST_BOUND

WORKERS = 4  # processes of a DataLoader
SETTLE = 16  # steps after these are started: the host is slower for a while after a fork


class Steps:
    """Runs steps of one rank and counts what should not happen in them."""

    def __init__(self, comm: object, given: argparse.Namespace, rank: int) -> None:
        self.comm, self.given, self.rank = comm, given, rank
        self.syncs, self.slowest = 0, 0.0  # milliseconds
        self.forwards: list[list[float]] = []  # of each step, the seconds of each op
        self.cuda = given.device.type == "cuda"

    def step(self, batch: PackedBatch) -> None:
        """The ops of one batch, each with tensors of its own."""
        length, kind = len(batch.tokens), {"dtype": self.given.dtype, "device": self.given.device}
        q_heads, kv_heads = self.given.heads
        sizes = [(h, self.given.dim) for h in (q_heads, kv_heads, kv_heads)]
        x: Tensor | None = None
        self.forwards.append([])
        for _ in range(self.given.ops):
            q, k, v = (torch.randn(length, *size, **kind, requires_grad=True) for size in sizes)
            q, began = q if x is None else x, perf_counter()
            x = wrap_ring_attn_varlen_func(
                q,
                k,
                v,
                batch.cu_seqlens,
                batch.cu_seqlens,
                causal=True,
                process_group=self.comm,
                kernel=self.given.kernel,
                layout=batch.layout,
            )
            self.forwards[-1].append(perf_counter() - began)
        assert x is not None
        x.backward(x.detach().clone())  # no gradient shares memory with out

    def run(self, batches: Iterable[PackedBatch]) -> float:
        """Milliseconds per step."""
        count = 0
        if self.cuda:
            torch.cuda.synchronize()
        start = perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches:
                began = perf_counter()
                if self.cuda:
                    torch.cuda.set_sync_debug_mode("warn")
                self.step(batch)
                self.slowest = max(self.slowest, 1e3 * (perf_counter() - began))
                if self.cuda:
                    torch.cuda.set_sync_debug_mode("default")
                count += 1
        if self.cuda:
            torch.cuda.synchronize()
        waits = [warning for warning in caught if "called a synch" in str(warning.message)]
        self.syncs += len(waits)
        for place in {f"{warning.filename}:{warning.lineno}" for warning in waits}:
            print(f"the host waits in {place}", file=sys.stderr)
        return 1e3 * (perf_counter() - start) / count


def documents(tokens: int, seeds: Iterable[int]) -> list[list[np.ndarray]]:
    """Batches of documents, as lists of tokens."""
    bounds = [np.array(document_bounds(tokens, seed)) for seed in seeds]
    return [[np.zeros(n, dtype=np.int64) for n in np.diff(each)] for each in bounds]


TIMES = "replayed", "known", "new", "again", "ahead", "ahead - again"
COLUMNS = (
    "tokens",
    "layout",
    "warm-up s",
    *TIMES,
    "slowest",
    "ops 1 2 3",
    "compiled",
    "syncs",
    "MiB",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 14, 1 << 16, 1 << 17])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ops", type=int, default=4, help="attention ops of a step")
    most = 2 * MOST_BOUND  # bound calls that are kept
    parser.add_argument("--batches", type=int, default=40, help=f"of a list, at most {most}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    given = parser.parse_args(arguments)
    if given.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; with --device cpu and fewer tokens it runs on a CPU")
    if given.batches > most:
        parser.error(f"--batches {given.batches}: the first would be forgotten; {most} at most")
    return given


def main() -> None:
    given = parse()
    rank, ranks = int(os.environ.get("RANK", given.ranks // 2)), given.ranks
    comm: object
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if given.device.type == "cuda" else "gloo")
        ranks, comm = dist.get_world_size(), dist.group.WORLD
    if given.device.type == "cuda":
        given.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(given.device)
    if "RANK" not in os.environ:
        on_gpu = given.device.type == "cuda"
        comm = AbsentPeers(rank, ranks, given.device) if on_gpu else FakeComm(rank, ranks)
    given.dtype = torch.bfloat16 if given.device.type == "cuda" else torch.float32
    say = print if rank == 0 or "RANK" not in os.environ else lambda *_, **__: None
    say("".join(f"{column:>24}" for column in COLUMNS))
    seeds = count()
    for tokens in given.tokens:
        for layout in ("balanced", "contiguous"):
            row = measured(tokens, layout, comm, given, (rank, ranks), seeds)
            say("".join(f"{cell!s:>24}" for cell in row), flush=True)


def measured(
    tokens: int,
    layout: str,
    comm: object,
    given: argparse.Namespace,
    place: tuple[int, int],
    seeds: Iterator[int],
) -> list[object]:
    """A row of the table, by :data:`COLUMNS`."""
    start, (rank, ranks) = perf_counter(), place
    kind = {"dtype": given.dtype, "device": given.device, "kernel": given.kernel}
    heads = given.heads[0], given.heads[1]
    of = {"heads": heads, "head_dim": given.dim, "process_group": comm, "layout": layout}
    warm_up(tokens, **of, **kind)
    seconds, compiled = perf_counter() - start, compiled_kernels()
    gc.collect()
    gc.freeze()  # or a full collection would look at all that compilers left, for 0.2 s or more
    steps, slowest = Steps(comm, given, rank), 0.0
    costs = group_costs(comm)
    pack = PackDocuments(ranks, rank, heads, layout=layout, head_dim=given.dim, costs=costs)
    steps.run(map(pack, documents(tokens, islice(seeds, 3))))
    drawn = [documents(tokens, islice(seeds, given.batches)) for _ in range(2 * given.rounds)]
    settle = documents(tokens, islice(seeds, SETTLE))
    # Each list comes twice, new and then known; then other workers plan its batches, so that these
    # are new to them.
    turn = int(given.batches % WORKERS == 0)
    loader = DataLoader(
        [*settle, *(each for few in drawn[1::2] for each in (*few, *few[turn:], *few[:turn]))],
        batch_size=None,
        collate_fn=pack,
        num_workers=WORKERS,
        pin_memory=steps.cuda,
    )
    batches = iter(loader)
    steps.run(islice(batches, SETTLE))
    columns: dict[str, list[float]] = {name: [] for name in TIMES}
    forwards: list[list[float]] = []  # of each step, the seconds of each op
    for few in drawn[1::2]:
        steps.slowest, steps.forwards = 0.0, []
        # Batches are not kept, or their pinned memory could not be used again.
        columns["ahead"].append(steps.run(islice(batches, len(few))))
        slowest, forwards = max(slowest, steps.slowest), [*forwards, *steps.forwards]
        columns["again"].append(steps.run(islice(batches, len(few))))  # calls are still bound
    columns["ahead - again"] = list(np.subtract(columns["ahead"], columns["again"]))
    lists: list[list[PackedBatch]] = [[] for _ in range(given.rounds)]
    for few, made in zip(drawn[::2], lists, strict=True):
        columns["new"].append(steps.run(made.append(pack(each)) or made[-1] for each in few))
        columns["known"].append(steps.run(made))
    # Last, as batches that came often let those after them be recorded the first time.
    for made in lists:
        steps.run(made)  # records them
        columns["replayed"].append(steps.run(made))
    shown = [f"{np.median(t):.2f} ({min(t):.2f}-{max(t):.2f})" for t in columns.values()]
    first = " ".join(f"{1e6 * np.median(op):.0f}" for op in list(zip(*forwards, strict=True))[:3])
    counted = [f"{slowest:.1f}", first, compiled_kernels() - compiled, steps.syncs]
    most = torch.cuda.max_memory_reserved() >> 20 if given.device.type == "cuda" else 0
    return [tokens, layout, f"{seconds:.1f}", *shown, *counted, most]


if __name__ == "__main__":
    main()
