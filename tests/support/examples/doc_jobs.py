"""A block of the documentation that needs ranks; see ``ranks.Pool``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shared.llama import Llama, LlamaConfig, inputs
from shared.text_corpus import PackedText, load_documents
from torch import Tensor

SMALL = LlamaConfig(dim=32, heads=4, kv_heads=2, hidden=48)


def llama(layers: int = 2) -> Llama:
    """A small model in fp64, the same at each call."""
    torch.manual_seed(0)
    return Llama(replace(SMALL, layers=layers)).double()


def batch(step: int) -> dict[str, Tensor]:
    """What it is called with."""
    return inputs(PackedText(load_documents(10_000), 64).batch(step, packed=False), SMALL.op)


class LateOptimizer:
    """Of the model that a block makes, which is there when the first step is made."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def step(self) -> None:
        torch.optim.SGD(self.names["model"].parameters(), lr=0.5).step()


def step_of_two_copies(code: str) -> dict[str, float]:
    """A block that cuts ``model``, as two copies, and makes a step: how far from one process's."""
    names: dict[str, Any] = {"model": llama(), "batch": batch(dist.get_rank() // 2), **batch(0)}
    # As the block has it, but for what this model needs beside tokens and targets.
    code = code.replace('"targets": targets}', '"targets": targets, "position_ids": position_ids}')
    names["optimizer"] = LateOptimizer(names)
    with mock.patch.object(dist, "init_process_group"):  # the pool's is there
        exec(compile(code, "block", "exec"), names)

    alone = llama()
    losses = [alone(**batch(copy)) for copy in range(2)]
    torch.stack(losses).sum().backward()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    found = {name: (p.detach(), p.grad) for name, p in names["model"].named_parameters()}
    far = {"loss": (names["loss"] - losses[dist.get_rank() // 2]).abs().item()}
    for name, p in alone.named_parameters():
        value, gradient = found[name]
        far[name] = (value - p.detach()).abs().max().item()
        far[f"gradient of {name}"] = (gradient - p.grad).abs().max().item()
    return far
