"""Training steps of a Llama of 1B shape over several GPUs, beside what PyTorch offers.

    torchrun --nproc-per-node 2 examples/benchmark/training.py --tokens 32k
    torchrun --nproc-per-node 2 examples/benchmark/training.py --tokens 128k --checkpoint
    python examples/benchmark/training.py --ranks 2 --device cpu --tokens 64 --layers 2 --dim 32 \
--heads 4:2 --hidden 64 --vocab 300

A step is forward, backward, gradients added up over ranks, and a fused AdamW, on text. Parameters
and Adam's state are fp32, the rest bf16. For every contestant, the loss never makes the logits of
all tokens at once (``chunk_linear_cross_entropy``). Contestants run one after the other, in several
rounds, every other round in reverse order. A time is the median of all rounds' steps, of the
slowest rank, after two steps that do not count. If losses of the first step disagree, the program
exits with an error.

FLOP of MFU: 6 for each token and each parameter of a matrix product (including the head), and 12
for each attended pair, head and dimension of it, over the given rate of all GPUs; recomputation is
not counted. Memory: the peak of torch's allocator during a step; "device" also includes what else
the GPU allocated meanwhile (libraries, symmetric memory).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

if __name__ == "__main__":
    # Import from the package above, not from this file's folder.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from shared.llama import LlamaConfig, inputs
from shared.text_corpus import PackedText, load_documents

from benchmark.command import tokens as counted
from benchmark.ranks import Ranks, launch
from benchmark.show.text import markdown
from benchmark.train.options import LOSSES_APART, add_llama, llama_config
from benchmark.train.trainers import TRAINERS, Task, Trainer

GIB = 2**30
UNCOUNTED = 2  # steps before those that are timed
COLUMNS = (
    "",
    "loss, first and last step",
    "ms a step",
    "tokens/s",
    "MFU",
    "GiB",
    "device GiB",
    "first s",
)


def measure(trainer: Trainer, task: Task, ranks: Ranks, steps: int) -> dict[str, Any]:
    """Measure one contestant from scratch: seconds and bytes, each the largest over the ranks."""
    start = perf_counter()
    step = trainer.make(task, ranks)
    losses = [float(step()) for _ in range(UNCOUNTED)]
    ranks.wait()
    first = perf_counter() - start
    if ranks.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        ranks.together()
        ranks.wait()
        start = perf_counter()
        loss = step()
        ranks.wait()
        seconds.append(perf_counter() - start)
    peak = device = 0
    if ranks.cuda:
        free, total = torch.cuda.mem_get_info()
        peak, device = torch.cuda.max_memory_allocated(), total - free
    told = ranks.gather([peak, device, first])
    peak, device, first = (max(each) for each in zip(*told, strict=True))
    losses = ranks.gather([losses[0], float(loss)])
    if trainer.sequences(ranks.size) == 1:  # each rank's share of one
        losses = [[sum(each) / ranks.size for each in zip(*losses, strict=True)]]
    return {
        "seconds": [max(each) for each in zip(*ranks.gather(seconds), strict=True)],
        "losses": losses[0],
        "peak": peak,
        "device": device,
        "first": first,
    }


def flop(config: LlamaConfig, tokens: int) -> float:
    """FLOP of a step on one causal sequence."""
    d, kv = config.dim, config.kv_heads * config.head_dim
    matrices = config.layers * (2 * d * d + 2 * d * kv + 3 * d * config.hidden) + config.vocab * d
    pairs = tokens * (tokens + 1) / 2
    return 6.0 * matrices * tokens + 12.0 * config.layers * pairs * config.heads * config.head_dim


def run(args: argparse.Namespace) -> None:
    """Run on every rank."""
    ranks = Ranks(args.device)
    config = llama_config(args, op="zigzag", checkpoint=args.checkpoint)
    text = PackedText(load_documents(), args.tokens)
    each = [inputs(text.batch(n, packed=False), "zigzag") for n in range(ranks.size)]
    moved = [{name: t.to(ranks.device) for name, t in one.items()} for one in each]
    task = Task(config, moved, getattr(torch, args.dtype))
    chosen = [t for t in TRAINERS if not args.contestants or t.name in args.contestants]
    found: dict[str, list[dict[str, Any]]] = {trainer.name: [] for trainer in chosen}
    for turn in range(args.rounds):
        for trainer in chosen[:: -1 if turn % 2 else 1]:
            outcome = ranks.attempt(lambda t=trainer: measure(t, task, ranks, args.steps))
            told = outcome.value or {"failure": outcome.failure}
            found[trainer.name].append(told)
            if ranks.rank == 0:
                row = {"contestant": trainer.name, "turn": turn, "tokens": args.tokens, **told}
                row |= {
                    "ranks": ranks.size,
                    "checkpoint": args.checkpoint,
                    "torch": torch.__version__,
                }
                print(json.dumps(row), flush=True)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            outcome = told = None
            gc.collect()
            if ranks.cuda:
                torch.cuda.empty_cache()
    if ranks.rank == 0:
        print(table(found, chosen, config, args, ranks.size))
    ranks.close()
    first = [run["losses"][0] for runs in found.values() for run in runs if "failure" not in run]
    if first and not max(first) - min(first) <= LOSSES_APART:
        sys.exit(f"losses of the first step differ: {first}")


def table(
    found: dict[str, list[dict[str, Any]]],
    chosen: Sequence[Trainer],
    config: LlamaConfig,
    args: argparse.Namespace,
    ranks: int,
) -> str:
    """The table, with a line per contestant."""
    rows = []
    for trainer in chosen:
        runs = [run for run in found[trainer.name] if "failure" not in run]
        if not runs:
            failure = found[trainer.name][0]["failure"]
            rows.append([trainer.name, failure[:100], *[""] * (len(COLUMNS) - 2)])
            continue
        seconds = median(s for run in runs for s in run["seconds"])
        sequences = trainer.sequences(ranks)
        rate = flop(config, args.tokens) * sequences / seconds / ranks
        first, peak, device = (
            max(run[what] for run in runs) for what in ("first", "peak", "device")
        )
        rows.append(
            [
                trainer.name,
                " -> ".join(f"{x:.4f}" for x in runs[0]["losses"]),
                f"{seconds * 1e3:,.1f}",
                f"{args.tokens * sequences / seconds:,.0f}",
                f"{rate / args.tflops / 1e12:.1%}",
                f"{peak / GIB:.1f}",
                f"{device / GIB:.1f}",
                f"{first:.1f}",
            ]
        )
    kept = "inputs of blocks kept" if args.checkpoint else "all activations kept"
    title = f"{args.tokens:,} tokens a sequence, {ranks} ranks, {kept}; torch {torch.__version__}"
    return f"{title}\n\n{markdown(COLUMNS, rows, 1)}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=counted, default=32768, help="of a sequence, e.g. 128k")
    add("--checkpoint", action="store_true", help="compute blocks again in the backward")
    add("--contestants", nargs="+", choices=[t.name for t in TRAINERS])
    add("--steps", type=int, default=5, help="timed ones, a round")
    add("--rounds", type=int, default=2)
    add_llama(add)
    add("--tflops", type=float, default=989.0, help="a GPU's dense bf16 rate, for MFU")
    add("--json", type=Path, help="append a line for each contestant and round")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    launch(run, args.ranks, args)


if __name__ == "__main__":
    main()
