"""Cut a model on an op of your own: group norm over a sequence that lies on several processes.

Shows what a policy that asks for a forbidden split is told, then the plan, then how far the result
is from that of one process.

    python examples/annotate_an_op.py                        2 processes, the embedded engine
    python examples/annotate_an_op.py --engine nnscaler      on 2 GPUs, where nnscaler is installed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import start_ranks
from torch import Tensor, nn

from annotations import (
    Communicates,
    ComputeConfig,
    InnerCost,
    PartitionError,
    PartitionRule,
    group_named,
    parallelize,
    register_op,
)

TOLERANCE = 1e-10  # of fp64

# 1. The op. Each rank runs the function on its part of the tensors. By the annotation, batch `b`
#    and groups `g` may be cut as they are, channels `c^` may not; ranks that share `gain` add its
#    gradients up. If `l` is cut, a mean needs the tokens of all ranks: the rule has the op told
#    their process group. The backward is derived: the function is run again under autograd.


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        ctx.group, total = group, part.clone()
        dist.all_reduce(total, group=group_named(group))
        return total

    @staticmethod  # every rank's result depends on every rank's part
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return SumOverRanks.apply(grad, ctx.group), None


def mean(x: Tensor, group: str) -> Tensor:
    """Over a group's channels and all tokens, also those on other ranks: [b, 1, g, 1]."""
    sums = torch.stack([x, torch.ones_like(x)]).sum((2, 4), keepdim=True)
    total, count = SumOverRanks.apply(sums, group) if group else sums
    return total / count


def moved(bound: Any, site: Any, arguments: Mapping[str, Any], itemsize: int) -> InnerCost:
    """For plans: 2 means of 2 sums each; the backward makes them again and adds 2 gradients up."""
    sums_bytes = 4 * bound.sizes["b"] * bound.sizes["g"] * itemsize
    received = sums_bytes * 2 * (site.parts - 1) // site.parts
    return InnerCost("sums", received, 2 * received)


ALONG_L = Communicates(arguments=lambda site: {"group": site.group}, cost=moved)


@register_op(
    "b l g c^, g c^ -> b l g c^",
    name="example::group_norm",
    rule=PartitionRule(communicates={"l": ALONG_L}),
)
def group_norm(x: Tensor, gain: Tensor, group: str = "") -> Tensor:
    """Group normalisation (Wu and He, arXiv:1803.08494) over all tokens."""
    x = x - mean(x, group)
    return x * (mean(x * x, group) + 1e-5).rsqrt() * gain


# 2. A model for one device, which calls the op as any function.


class Mixer(nn.Module):
    """``x: [b, l, dim]`` to the mean over tokens of the square of what it makes of it."""

    def __init__(self, dim: int = 32, groups: int = 3, channels: int = 8) -> None:
        super().__init__()
        self.groups, self.channels = groups, channels
        self.up = nn.Linear(dim, groups * channels)
        self.gain = nn.Parameter(torch.rand(groups, channels))
        self.down = nn.Linear(groups * channels, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).view(*x.size()[:-1], self.groups, self.channels)
        y = F.silu(group_norm(y, self.gain)).flatten(2)
        return (x + self.down(y)).pow(2).sum(-1).mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Mixer().double()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(1, 64, 32, generator=generator, dtype=torch.float64)}


# 3. Two engines cut it; the result is that of one process.


def channels(ops: Any, config: ComputeConfig) -> dict[str, str]:
    """A policy that asks for what the annotation forbids."""
    return {op.name: "c" for op in ops}


def train(
    model: nn.Module, sync: Callable[[], None], device: torch.device
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of 3 steps, and the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        model.zero_grad()
        loss = model(batch(step)["x"].to(device))
        loss.backward()
        sync()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def main(engine: str) -> int:
    device, options = torch.device("cpu"), {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if engine == "nnscaler" else "gloo")
    rank = dist.get_rank()
    if engine == "nnscaler":
        device, options = torch.device("cuda", rank), {"reuse": "override"}
        torch.cuda.set_device(device)
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)

    try:
        parallelize(model(), batch(0), channels, config, engine="torch")
    except PartitionError as error:
        if rank == 0:
            print(error, end="\n\n")

    # Both cut what communicates inside, here group_norm on l; the other ops follow it. With
    # nnscaler "cp" would have autodist time every op first.
    policy = "cp" if engine == "torch" else "cp_follow"
    parallel = parallelize(model(), batch(0), policy, config, engine=engine, **options)
    losses, gradients = train(parallel, parallel.sync_grad, device)
    alone, whole = train(model(), lambda: None, torch.device("cpu"))
    differences = {"loss": max(abs(a - b) for a, b in zip(losses, alone, strict=True))}
    if engine == "torch":  # nnscaler names and cuts parameters its own way
        off = [(gradients[n] - g).abs().max().item() for n, g in whole.items()]
        differences["gradients"] = max(off)
    if rank == 0:
        print(parallel.plan, end="\n\n")
        shown = ", ".join(f"{what} {difference:.1e}" for what, difference in differences.items())
        print(f"largest difference from one process: {shown}")
    dist.destroy_process_group()
    return int(not all(difference < TOLERANCE for difference in differences.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=("torch", "nnscaler"), default="torch")
    arguments = parser.parse_args()
    if arguments.engine == "nnscaler" and not torch.cuda.is_available():
        parser.error("--engine nnscaler needs CUDA, which is not available here")
    start_ranks(2, sys.argv[1:])
    sys.exit(main(arguments.engine))
