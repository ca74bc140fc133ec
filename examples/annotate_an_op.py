"""Cut a model on an op of your own: group norm over a sequence that lies on several processes.

The op is in ``own_ops/group_norm.py``. Shows the error of a policy that asks for a forbidden split,
then the plan, then how far the result is from that of one process.

    python examples/annotate_an_op.py                        2 processes, the embedded engine
    python examples/annotate_an_op.py --engine nnscaler      on 2 GPUs, where nnscaler is installed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from own_ops.group_norm import group_norm
from shared.launch import on_ranks
from torch import Tensor, nn

from annotations import ComputeConfig, PartitionError, parallelize

TOLERANCE = 1e-10  # for fp64

# 1. A model for one device, which calls the op like any function.


class Mixer(nn.Module):
    """Maps ``x: [b, l, dim]`` to the mean over tokens of its squared outputs."""

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
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return Mixer().double()


def batch(seed: int) -> dict[str, Tensor]:
    """64 rows, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(1, 64, 32, generator=generator, dtype=torch.float64)}


# 2. Either of two engines cuts it; the result is that of one process.


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


def main(engine: str, device: torch.device) -> int:
    """Run on every rank; returns 0 if the result is that of one process."""
    rank = dist.get_rank()
    options = {"reuse": "override"} if engine == "nnscaler" else {}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)

    try:
        parallelize(model(), batch(0), channels, config, engine="torch")
    except PartitionError as error:
        if rank == 0:
            print(error, end="\n\n")

    # Both policies cut the op that communicates, here group_norm on l; the other ops follow it.
    # With nnscaler, "cp" would have autodist time every op first.
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
    return int(not all(difference < TOLERANCE for difference in differences.values()))


def parse() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=("torch", "nnscaler"), default="torch")
    given = parser.parse_args()
    if given.engine == "nnscaler" and not torch.cuda.is_available():
        parser.error("--engine nnscaler needs CUDA, which is not available here")
    return given


if __name__ == "__main__":
    engine = parse().engine
    on_ranks(lambda device: main(engine, device), 2, gpus=engine == "nnscaler")
