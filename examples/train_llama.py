"""Train a small Llama on real text, its sequence cut over several processes.

The model, in ``llama.py``, is written for one device. Its attention calls a ``wrap_*_attn_func``
without a group; ``parallelize`` does the rest. At the end the loss curve is compared with the same
run on one rank.

    python examples/train_llama.py                      2 processes, ring attention
    python examples/train_llama.py --nproc 4 --op varlen
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from launch import start_ranks
from llama import ATTENTION, Llama, LlamaConfig, inputs
from text_corpus import PackedText, load_documents
from torch import nn
from tqdm import tqdm

from annotations import ComputeConfig, parallelize

TOLERANCE = 1e-4  # largest difference of the two loss curves


def train(
    name: str,
    model: nn.Module,
    sync: Callable[[], None],
    text: PackedText,
    args: argparse.Namespace,
) -> list[float]:
    """Losses of ``args.steps`` steps; rank 0 shows a bar and the loss every 10 steps."""
    shown = dist.get_rank() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    losses: list[float] = []
    bar = tqdm(range(args.steps), desc=name, unit="step", disable=None if shown else True)
    start = time.perf_counter()
    for step in bar:
        loss = model(**inputs(text.batch(step, packed=args.op == "varlen"), args.op))
        optimizer.zero_grad()
        loss.backward()
        sync()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
        if shown and (step % 10 == 0 or step == args.steps - 1):
            bar.write(f"{name}  step {step:3d}  loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - start
    if shown:
        print(f"{name}: {args.steps * args.seq_len / seconds:,.0f} tokens/s")
    return losses


def main(args: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    torch.set_num_threads(max(1, cores // world))
    text = PackedText(load_documents(), args.seq_len, seed=0)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(op=args.op))
    dummy = inputs(text.batch(0, packed=args.op == "varlen"), args.op)

    parallel = parallelize(model, dummy, "cp", ComputeConfig(world, world))
    if rank == 0:
        print(parallel.plan)
    losses = train(f"{world} ranks", parallel, parallel.sync_grad, text, args)

    difference = 0.0
    if rank == 0 and not args.no_compare:
        torch.set_num_threads(cores)
        alone = train("one rank", model, lambda: None, text, args)
        # numpy's max, unlike Python's, is NaN where any loss is.
        difference = float(np.abs(np.subtract(losses, alone)).max())
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; largest difference from one rank over "
            f"{args.steps} steps: {difference:.1e} (allowed {TOLERANCE:.0e})"
        )
    dist.barrier()
    dist.destroy_process_group()
    return int(not difference < TOLERANCE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes to cut the sequence over")
    parser.add_argument("--op", choices=tuple(ATTENTION), default="ring")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens (bytes of text) a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--no-compare", action="store_true", help="skip the run on one rank")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    # torchrun takes --nproc for an option of its own.
    given = {name: value for name, value in vars(arguments).items() if name != "nproc"}
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in given.items() if not isinstance(v, bool)]
    flags += [f"--{n.replace('_', '-')}" for n, v in given.items() if v is True]
    start_ranks(arguments.nproc, flags)
    sys.exit(main(arguments))
