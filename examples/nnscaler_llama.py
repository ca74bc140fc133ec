"""Train the Llama of ``shared/llama.py`` through nnscaler, its sequence cut over GPUs.

``parallelize`` hands the single-device model to nnscaler, which traces it, cuts attention on its
sequence ("cp_follow": the other ops follow it) and generates the code of each rank. Shows that the
loss curve is that of one process, in fp64.

    python examples/nnscaler_llama.py                       2 GPUs, where nnscaler is installed
    python examples/nnscaler_llama.py --policy cp           autodist times and plans the other ops
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from shared.curves import losses_of, same_losses
from shared.launch import count, on_ranks
from shared.llama import Llama, LlamaConfig, inputs
from shared.text_corpus import PackedText, load_documents
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize

ADAM = {"lr": 1e-3, "eps": 1e-6}


class Norm(nn.Module):
    """RMS norm in ops that nnscaler knows; it has no annotation for ``torch.rms_norm``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(torch.mean(x * x, dim=2, keepdim=True) + 1e-6) * self.weight


def llama(config: LlamaConfig) -> nn.Module:
    """The examples' Llama in fp64, the same at each call."""
    torch.manual_seed(0)
    model = Llama(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            model.set_submodule(name, Norm(config.dim))
    return model.double()


def missing(gpus: int) -> list[str]:
    """What this machine lacks, and how to get it."""
    found = []
    if importlib.util.find_spec("nnscaler") is None:
        how = "git clone https://github.com/msrasys/nnscaler && pip install ./nnscaler regex"
        found.append(f"nnscaler is not installed: {how}")
    if torch.cuda.device_count() < gpus:
        found.append(f"nnscaler runs on CUDA: {gpus} GPUs needed, {torch.cuda.device_count()} here")
    return found


def train(
    name: str,
    model: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[dict[str, Tensor]],
) -> list[float]:
    """The loss of each batch."""

    def step(n: int) -> Tensor:
        loss = model(**batches[n])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return losses_of(name, len(batches), batches[0]["tokens"].numel(), step)


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if the losses are those of one process."""
    import nnscaler

    ranks = dist.get_world_size()
    config = LlamaConfig(dim=given.dim, layers=2, hidden=2 * given.dim)
    text = PackedText(load_documents(max_bytes=100_000), given.tokens)
    batches = [inputs(text.batch(step, packed=False), config.op) for step in range(given.steps)]
    batches = [{name: t.to(device) for name, t in batch.items()} for batch in batches]

    compute = ComputeConfig(ranks, ranks, trace_strategy=device.type)
    where = {"gen_savedir": given.generated, "reuse": "override"}
    model = llama(config)
    cut = parallelize(model, batches[0], given.policy, compute, engine="nnscaler", **where)
    # nnscaler's optimizer adds the gradients up over the ranks before its step.
    optimizer = nnscaler.build_optimizer(cut, torch.optim.AdamW, **ADAM)
    if dist.get_rank() == 0:
        print(cut.plan, end="\n\n")
    losses = train(f"{ranks} ranks", cut, optimizer, batches)
    model = llama(config).to(device)
    alone = train("one rank", model, torch.optim.AdamW(model.parameters(), **ADAM), batches)
    return same_losses(losses, alone, 1e-9)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--policy", choices=("cp_follow", "cp"), default="cp_follow")
    parser.add_argument("--dim", type=count, default=64)
    parser.add_argument("--tokens", type=count, default=256, help="in a batch")
    parser.add_argument("--steps", type=count, default=5)
    parser.add_argument("--generated", type=Path, default=Path("generated"), help="where code goes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    lacks = missing(options.ranks)
    if lacks:
        sys.exit("\n".join(lacks))
    on_ranks(lambda device: main(options, device), options.ranks)
