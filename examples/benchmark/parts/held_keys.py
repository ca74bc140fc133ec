"""What it costs to let ranks hold only few keys of others at once, over messages (NCCL).

    torchrun --nproc-per-node 2 examples/benchmark/parts/held_keys.py
    torchrun --nproc-per-node 2 examples/benchmark/parts/held_keys.py --device cpu --tokens 256

Each rank counts as a host of its own. A step is causal attention, zigzag, forward and backward.
Each round tries every bound in turn; "inf" is no bound. Times are milliseconds of a step, including
the wait for the device: the median and the span of the rounds. Memory is what a step takes beyond
its inputs at its peak. On a GPU, bounds below 128 MiB of keys act as 128 MiB. See also
``TORCH_NCCL_HIGH_PRIORITY`` of torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.path.insert(1, str(Path(__file__).parents[2]))

from benchmark.ranks import from_torchrun

from customized_ops.ring_attention import Layout, wrap_ring_attn_func
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.comm.dist_comm import COSTS, HOSTS
from customized_ops.ring_attention.core.comm.one_sided.symmetric import CHOICE

STEPS = 5  # per round; the first is not measured


def group_with(bound: str) -> dist.ProcessGroup:
    """A group of all ranks, each on a host of its own."""
    group = dist.new_group(list(range(dist.get_world_size())))
    hosts = ",".join(["1"] * dist.get_world_size())
    with patch.dict(os.environ, {CHOICE: "nccl", HOSTS: hosts, COSTS: f"held_shards={bound}"}):
        comm_by_name(group.group_name)
    return group


class Attention:
    """The shards of one rank."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device, rank = torch.device(given.device), dist.get_rank()
        self.cuda = self.device.type == "cuda"
        self.layout = Layout.zigzag(given.tokens, dist.get_world_size())
        dtype = torch.bfloat16 if self.cuda else torch.float32
        tokens, (h, g) = self.layout.sizes[rank], given.heads
        self.q, self.k, self.v, self.dout = (
            torch.randn(1, tokens, n, given.dim, device=self.device, dtype=dtype)
            for n in (h, g, g, h)
        )
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()

    def step(self, group: dist.ProcessGroup) -> None:
        """A forward and a backward."""
        options = {"causal": True, "layout": self.layout, "process_group": group}
        wrap_ring_attn_func(self.q, self.k, self.v, **options).backward(self.dout)
        self.q.grad = self.k.grad = self.v.grad = None

    def round(self, group: dist.ProcessGroup) -> tuple[float, float]:
        """Milliseconds of a step, and MiB."""
        times = []
        self.step(group)
        before = 0
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(STEPS):
            dist.barrier(group)
            start = perf_counter()
            self.step(group)
            if self.cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (perf_counter() - start))
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        return float(np.median(times)), (peak - before) / (1 << 20)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1 << 17)
    parser.add_argument("--bounds", nargs="+", default=["inf", "1", "0.5"], help="in shards")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table, on rank 0."""
    given = parse()
    local_rank = from_torchrun("LOCAL_RANK")
    if given.device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    groups = {bound: group_with(bound) for bound in given.bounds}
    attention = Attention(given)
    rounds = [[attention.round(group) for group in groups.values()] for _ in range(given.rounds)]
    if dist.get_rank() == 0:
        print(f"{'bound':>8}{'ms':>10}{'span':>18}{'MiB':>8}")
        for n, bound in enumerate(groups):
            times, memory = zip(*(each[n] for each in rounds), strict=True)
            span = f"{min(times):.1f}-{max(times):.1f}"
            print(f"{bound:>8}{np.median(times):>10.1f}{span:>18}{max(memory):>8.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
