"""Jobs for the tests of training where a plan keeps parameters in parts; see ``ranks.Pool``."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engine_jobs import sample, tiny_llama
from memory_jobs import Again, Watch
from rank_groups import device
from steps import gradients, over_all, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from annotations import ComputeConfig, parallelize
from annotations.engines.torch.module.gradient_sync import local
from annotations.engines.torch.module.parallel_module import ParallelModule
from annotations.engines.torch.strategies.placements import cut_axes

LENGTH, STEPS, MAX_NORM = 16, 3, 0.1


def batch(seed: int) -> dict[str, Tensor]:
    return {name: t.to(device()) for name, t in sample("ring", 1, LENGTH, seed).items()}


def parallel(policy: Any, shape: tuple[int, ...], **config: Any) -> ParallelModule:
    told = ComputeConfig(
        math.prod(shape), dist.get_world_size(), pas_config={"mesh_shape": shape}, **config
    )
    model = parallelize(tiny_llama("ring").to(device()), batch(1), policy, told)
    cut = [bool(cut_axes(p)) for p in model.parameters()]
    assert any(cut) and not all(cut)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def trained(
    policy: Any, shape: tuple[int, ...], optimizer: dict[str, bool], overlap: bool, torchs: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after some steps of two micro-batches each, and the norms before clipping by
    ``clip_gnorm`` or by torch's own."""
    model = parallel(policy, shape, use_async_reducer=overlap, reducer_bucket_cap_mb=0.01)
    copies, copy = (
        model.compute_config.num_scale_units,
        dist.get_rank() // model.compute_config.plan_ngpus,
    )
    update = AdamW(model.parameters(), lr=1e-2, **optimizer)
    norms = []
    for step in range(STEPS):
        update.zero_grad()
        first, second = (step * 2 * copies + 2 * copy + n for n in range(2))
        with model.no_sync():
            (model(**batch(first)) / copies).backward()
        (model(**batch(second)) / copies).backward()
        if torchs:
            model.sync_grad()
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            norm, _ = model.clip_gnorm(MAX_NORM)
        norms.append(whole(norm).item())
        update.step()
    return {name: whole(p) for name, p in model.named_parameters()}, norms


def alone(copies: int) -> tuple[dict[str, Tensor], list[float]]:
    """The same on one process."""
    model = tiny_llama("ring")
    update = AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        update.zero_grad()
        for n in range(2 * copies):
            (model(**sample("ring", 1, LENGTH, step * 2 * copies + n)) / copies).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        update.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def config(shape: tuple[int, ...]) -> ComputeConfig:
    ranks = math.prod(shape)
    return ComputeConfig(ranks, ranks, pas_config={"mesh_shape": shape})


def in_single_precision(policy: Any) -> tuple[float, dict[str, Tensor], int, str]:
    """Loss, gradients, bytes of gradients that a rank received in ``sync_grad``, and the plan, of
    parameters in fp64 that are computed with in fp32."""
    module = tiny_llama("ring").to(device())
    model = parallelize(module, batch(1), policy, over_all(), compute_dtype=torch.float32)
    loss = model(**batch(1))
    loss.backward()
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        model.sync_grad()
    sent = sum(call.args[0].nbytes for call in reduce.call_args_list)
    # With every gradient that travels goes a number: whether there is one.
    travel = [p for p in model.parameters() if not cut_axes(p)]
    sent -= 8 * len(travel)
    ranks = dist.get_world_size()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    received = 2 * sent * (ranks - 1) // ranks
    return loss.item(), gradients(model), received, model.plan.to_json()


def resumed(
    policy: Any, shape: tuple[int, ...], load: str | None, save: str | None, steps: range
) -> list[float]:
    """Losses of some steps; what torch's distributed checkpoints load before, and save after."""
    model = parallelize(tiny_llama("ring").to(device()), batch(1), policy, config(shape))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if load:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=load)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        model.clip_gnorm(MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    if save:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=save)
    # For the original: whole, and loaded again from it.
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        tiny_llama("ring").load_state_dict(gathered)
    model.load_state_dict({name: whole(t) for name, t in model.state_dict().items()})
    assert model(**batch(1)).item() == model(**batch(1)).item()
    return losses


def checkpointed(again: bool) -> tuple[float, dict[str, Tensor], int, int]:
    """Loss, gradients, collectives of a step, and bytes held between forward and backward."""
    module = tiny_llama("ring", layers=2)
    if again:
        module.blocks = nn.ModuleList(Again(block) for block in module.blocks)
    model = parallelize(module.to(device()), batch(1), "tp", over_all())
    before = [local(t) for t in (*model.parameters(), *model.buffers())]
    with Watch(before) as watch:
        loss = model(**batch(1))
        held = watch.held_bytes()
        loss.backward()
    model.sync_grad()
    grads = {name.replace(".block.", "."): grad for name, grad in gradients(model).items()}
    return loss.item(), grads, watch.collectives, held
