"""Jobs for the tests of what a training run keeps: parameters, optimizer, scheduler, generator."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from dropout_jobs import OneProcess
from engine_jobs import sample, tiny_llama
from rank_groups import device
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import wrap_ring_attn_func

STEPS, LENGTH = 100, 32


def model_with_dropout() -> nn.Module:
    model = tiny_llama("ring")
    model.norm = nn.Sequential(model.norm, nn.Dropout(0.1))
    return model


class Training:
    """A run that can be saved and resumed, on any number of ranks."""

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        config = ComputeConfig(ranks, ranks)
        self.model = parallelize(model_with_dropout(), sample("ring", 1, LENGTH), "cp", config)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = CosineAnnealingLR(self.optimizer, STEPS)
        self.step = 0
        torch.manual_seed(3)

    def run(self, until: int) -> list[float]:
        losses = []
        for step in range(self.step, until):
            loss = self.model(**sample("ring", 1, LENGTH, seed=step % 10))
            self.optimizer.zero_grad()
            loss.backward()
            self.model.clip_gnorm(0.5)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        self.step = until
        return losses

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "generator": torch.get_rng_state(),
            "step": self.step,
        }

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["generator"])
        self.step = state["step"]


def trained(load: str | None, save: str | None, at: int, until: int) -> list[float]:
    """Losses from where a run was saved, or from the first step; saved in between."""
    names = list(model_with_dropout().state_dict())
    run = Training()
    if load:
        run.load(load)
    assert list(run.model.state_dict()) == names
    losses = run.run(at)
    if save:
        run.save(save)
    return losses + run.run(until)


def alone() -> list[float]:
    """The whole run on one process, with the engine's dropout."""
    model = model_with_dropout()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    losses = []
    torch.manual_seed(3)
    for step in range(STEPS):
        seed = int(torch.randint(2**63 - 1, ()))
        with mock.patch.object(F, "dropout", OneProcess(seed, copy=0)):
            loss = model(**sample("ring", 1, LENGTH, seed=step % 10))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def with_sharded_optimizer(steps: int) -> list[Tensor]:
    """Parameters after some steps; each rank keeps the optimizer's state of some of them."""
    # Imported here: it warns of what torch itself deprecates.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ranks = dist.get_world_size()
    model = parallelize(tiny_llama("ring"), sample("ring", 1, 16), "cp", ComputeConfig(2, ranks))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    for step in range(steps):
        model.zero_grad()
        (model(**sample("ring", 1, 16, step)) / model.compute_config.num_scale_units).backward()
        model.clip_gnorm(0.1)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


class OverTwoAxes(nn.Module):
    """A model in which the ranks of ``group`` hold the tokens of a sequence."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.embed = nn.Embedding(16, 12).double()
        self.blocks = nn.ModuleList(nn.Linear(12, 36).double() for _ in range(2))
        self.head = nn.Linear(12, 16).double()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The sum of the tokens' losses."""
        x = self.embed(tokens)
        for block in self.blocks:
            q, k, v = block(x).view(*x.shape[:2], 9, 4).split(3, 2)
            x = x + wrap_ring_attn_func(q, k, v, process_group=self.group).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


def tokens_and_targets(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(16, (2, 12), generator=g), torch.randint(16, (2, 12), generator=g)


def fully_sharded(steps: int) -> list[Tensor]:
    """Parameters after some steps; batches over "dp", tokens over "cp", parameters over "cp"."""
    mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    model = OverTwoAxes(mesh.get_group("cp")).to(device())
    for layer in (*model.blocks, model):
        fully_shard(layer, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        tokens, targets = (
            x.to(device())[dp : dp + 1].chunk(2, dim=1)[cp] for x in tokens_and_targets(step)
        )
        # FSDP takes the mean of gradients over all ranks.
        loss = model(tokens, targets) * dist.get_world_size() / 24
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.full_tensor().detach().cpu() for p in model.parameters()]
