"""Jobs for the tests of training where a plan keeps parameters in parts; see ``ranks.Pool``."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_jobs import sample, tiny_llama
from rank_groups import device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from annotations import ComputeConfig, parallelize
from annotations.engines.torch.lying import cut_axes
from annotations.engines.torch.module import ParallelModule

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


def whole(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu()


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
    told = config((dist.get_world_size(),))
    module = tiny_llama("ring").to(device())
    model = parallelize(module, batch(1), policy, told, compute_dtype=torch.float32)
    loss = model(**batch(1))
    loss.backward()
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        model.sync_grad()
    sent = sum(call.args[0].nbytes for call in reduce.call_args_list)
    # With every gradient that travels goes a number: whether there is one.
    travel = [p for p in model.parameters() if not cut_axes(p)]
    sent -= 8 * len(travel)
    ranks = dist.get_world_size()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert all(p.dtype == torch.float64 for p in model.parameters())
    return loss.item(), grads, 2 * sent * (ranks - 1) // ranks, model.plan.to_json()
