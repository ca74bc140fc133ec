"""Train a small Llama on real text, its sequence split over several processes.

The model, in ``shared/llama.py``, is written for one device. Its attention calls a
``wrap_*_attn_func`` without a group; ``parallelize`` does the rest. Then the same model is trained
on one process, and the two loss curves are compared: they are equal up to rounding.

    python examples/train_llama.py                      2 processes, ring attention
    python examples/train_llama.py --nproc 4 --op varlen
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from shared.curves import losses_of, same_losses, share_cores
from shared.launch import count, on_ranks
from shared.llama import ATTENTION, Llama, LlamaConfig, inputs
from shared.text_corpus import PackedText, load_documents
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize

TOLERANCE = 1e-4  # largest difference of the two loss curves


def train(
    name: str,
    model: nn.Module,
    sync: Callable[[], None],
    text: PackedText,
    args: argparse.Namespace,
) -> list[float]:
    """Losses of ``args.steps`` steps; ``sync`` adds gradients up over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    def step(n: int) -> Tensor:
        loss = model(**inputs(text.batch(n, packed=args.op == "varlen"), args.op))
        optimizer.zero_grad()
        loss.backward()
        sync()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        return loss

    return losses_of(name, args.steps, args.seq_len, step)


def main(args: argparse.Namespace) -> int:
    """Run on every rank; returns 0 if the losses over ranks are those of one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share_cores(world)
    text = PackedText(load_documents(), args.seq_len, seed=0)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=args.layers, op=args.op))
    dummy = inputs(text.batch(0, packed=args.op == "varlen"), args.op)

    parallel = parallelize(model, dummy, "cp", ComputeConfig(world, world))
    if rank == 0:
        print(parallel.plan)
    losses = train(f"{world} ranks", parallel, parallel.sync_grad, text, args)
    if args.no_compare:
        return 0
    alone = losses
    if rank == 0:  # the others wait
        share_cores(1)
        alone = train("one rank", model, lambda: None, text, args)
    failed = same_losses(losses, alone, TOLERANCE)
    if rank == 0 and not failed:
        print(f"The loss curve of {world} ranks equals that of one process, up to rounding.")
        print("The speeds above mean nothing: the ranks share the cores of this machine.")
    return failed


def parse() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=count, default=2, help="processes that share the sequence")
    parser.add_argument("--op", choices=tuple(ATTENTION), default="ring")
    parser.add_argument("--steps", type=count, default=30)
    parser.add_argument("--seq-len", type=count, default=1024, help="tokens (bytes of text) a step")
    parser.add_argument("--layers", type=count, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--no-compare", action="store_true", help="skip the run on one rank")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    on_ranks(lambda device: main(arguments), arguments.nproc, gpus=False)
