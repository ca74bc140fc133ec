"""Jobs for the tests of activation checkpointing and of mixed precision; see ``ranks.Pool``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from engine_jobs import sample, tiny_llama
from rank_groups import device
from steps import gradients, over_all, received_bytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import wrap_ring_attn_func


class Again(nn.Module):
    """A block that is run again in the backward."""

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=self.reentrant)


class Watch(TorchDispatchMode):
    """How often ranks exchange messages, and what is still held of all that was made anew."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.collectives = self.attentions = 0
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        waits = "wait_tensor" in str(func)
        self.collectives += func.namespace == "_c10d_functional" and not waits
        self.attentions += str(func) == "seqshard.ring_attn.default"
        for value in tree_leaves(results):
            value = value._local_tensor if isinstance(value, DTensor) else value
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.before:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def held_bytes(self) -> int:
        return sum(nbytes for ref, nbytes in self.made.values() if not ref.expired())


def recomputed(again: bool) -> tuple[float, list[Tensor], tuple[int, int, int], int]:
    """Loss, gradients, what was communicated in forward and backward, bytes held in between."""
    module = tiny_llama("ring", layers=2)
    if again:
        module.blocks = nn.ModuleList(Again(block) for block in module.blocks)
    given = {name: t.to(device()) for name, t in sample("ring", 1, 64).items()}
    model = parallelize(module.to(device()), given, "cp", over_all())
    before = received_bytes()
    with Watch((*model.parameters(), *model.buffers())) as watch:
        loss = model(**given)
        held = watch.held_bytes()
        loss.backward()
    moved = received_bytes() - before, watch.collectives, watch.attentions
    model.sync_grad()
    assert model.eval()(**given).item() == loss.item()  # forwards without gradients
    return loss.item(), [p.grad.cpu() for p in model.parameters()], moved, held


def in_single_precision(plan: int) -> tuple[float, dict[str, Tensor]]:
    given = {name: t.to(device()) for name, t in sample("ring", 1, 16).items()}
    config = ComputeConfig(plan, dist.get_world_size())
    module = tiny_llama("ring").to(device())
    model = parallelize(module, given, "cp", config, compute_dtype=torch.float32)
    loss = model(**given)
    (loss / config.num_scale_units).backward()
    model.sync_grad()
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float64 for p in model.parameters())
    return loss.item(), gradients(model)


class Ways(nn.Module):
    """Ways to have parts of a forward run otherwise."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "autocast":
                with torch.autocast(x.device.type, torch.bfloat16):
                    y = self.a(x)
                y = y.float()
            case "no_grad":
                with torch.no_grad():
                    y = self.a(x)
            case "detached":
                y = self.a(x).detach() + self.b(x)
            case "harmless":
                with torch.no_grad():
                    scale = torch.arange(8, device=x.device) / 8
                y = self.b(x) * scale
            case "reentrant":
                y = checkpoint(self.a, x, use_reentrant=True)
            case "selective":
                keep = [torch.ops.aten.linear.default]
                contexts = functools.partial(create_selective_checkpoint_contexts, keep)
                y = checkpoint(self.a, x, use_reentrant=False, context_fn=contexts)
            case "nested":
                y = checkpoint(Again(self.a), x, use_reentrant=False)
            case "on cpu":
                with torch.autograd.graph.save_on_cpu():
                    y = self.a(x)
            case _:
                y = self.a(x)
        y = y.view(*x.shape[:2], 2, 4)
        return wrap_ring_attn_func(y, y, y).sum()


def ways(way: str) -> tuple[float, list[Tensor | None]] | str:
    torch.manual_seed(1)
    x = torch.randn(2, 8, 8)
    try:
        model = parallelize(Ways(way), {"x": x}, "cp", ComputeConfig(2, 2))
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast around"):
            loss = model(x)
    except ValueError as error:
        return str(error)
    loss.backward()
    model.sync_grad()
    return loss.item(), [p.grad for p in model.parameters()]


class Dropping(nn.Module):
    """A linear that reads what was dropped, and attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop = nn.Dropout(0.4)
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.drop(x)).unflatten(-1, (2, 4))
        return x + wrap_ring_attn_func(y, y, y).flatten(2)


def dropped_again(again: bool) -> tuple[float, list[Tensor], list[int]]:
    """Loss, gradients, and how often the forward's and the backward's graph draw."""
    torch.manual_seed(1)
    x = torch.randn(2, 8, 8, dtype=torch.float64).to(device())
    module = nn.Sequential(*[Again(Dropping()) if again else Dropping() for _ in range(2)])
    model = parallelize(module.to(device()), {"input": x}, "cp", over_all())
    torch.manual_seed(2)
    loss = model(x).square().sum()
    loss.backward()
    model.sync_grad()
    [trace] = model._program().traces
    draws = [
        sum(node.target is torch.ops.seqshard.dropout.default for node in graph.nodes)
        for graph in trace.graphs
    ]
    return loss.item(), [p.grad.cpu() for p in model.parameters()], draws
