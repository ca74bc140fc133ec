"""Probes of models as users have them, over real ranks; see ``ranks.Pool``."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import probe_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import (
    Layout,
    ModelRun,
    PeerFailed,
    check_parallel_model,
    wrap_ring_attn_func,
)


class Small(nn.Module):
    """One layer of attention that knows of no group; returns the loss and hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(32, 16), nn.Linear(16, 48)
        self.head = nn.Linear(16, 32)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.embed(input_ids)).unflatten(-1, (3, 2, 8)).unbind(2)
        x = wrap_ring_attn_func(q, k, v, causal=True).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), x


def batch_of_two() -> dict[str, Tensor]:
    """What a small module is called with."""
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def step(
    model: Any, batch: Mapping[str, Tensor], scale: float = 1.0, syncs: bool = False
) -> ModelRun:
    """Of a module that takes whole batches."""
    loss, hidden = model(**batch)
    (loss * scale).backward()
    if syncs:
        model.sync_grad()
    return ModelRun(loss.detach(), hidden, gradients=model)


def parallelized(policy: str, forgets_sync: bool = False) -> str:
    """The report of a module of ``parallelize``; its gradients may not be added up."""
    batch, size = batch_of_two(), dist.get_world_size()
    alone, model = (
        Small(),
        parallelize(Small(), batch, policy, ComputeConfig(size, size), lowered=not forgets_sync),
    )
    report = check_parallel_model(
        lambda given: step(alone, given),
        lambda given: step(model, given, syncs=not forgets_sync),
        batch,
        dist.group.WORLD,
        places=[0, 7, 8],
    )
    return str(report)


def under_fsdp(scale: float) -> str:
    """The report of a module whose weights are sharded, and whose gradients are DTensors: FSDP
    averages them over ranks, which here have the same rows."""
    alone, model = Small(), fully_shard(Small())
    report = check_parallel_model(
        lambda given: step(alone, given),
        lambda given: step(model, given, scale),
        batch_of_two(),
        dist.group.WORLD,
        labels=None,
        places=[0],
    )
    return str(report)


def by_hand(drops: str = "") -> str:
    """The report of the small model over the world."""
    layout = Layout.contiguous(probe_models.TOKENS, dist.get_world_size())
    alone, parallel = probe_models.models(layout, dist.group.WORLD, drops)
    batch = probe_models.make_batch()
    told = {"documents": probe_models.DOCUMENTS, "labels": None, "places": [0, 11, 12]}
    return str(check_parallel_model(alone, parallel, batch, dist.group.WORLD, **told))


def one_fails(failing: int) -> tuple[str, list[str]]:
    """The report where a rank's own code fails after some ops, and what others heard of it."""
    size = dist.get_world_size()
    group = dist.new_group(list(range(size)))  # of no use after that
    layout = Layout.contiguous(probe_models.TOKENS, size)
    alone, parallel = probe_models.models(layout, group)
    runs, heard = itertools.count(1), []

    def may_fail(batch: Any) -> ModelRun:
        if next(runs) == 2 and dist.get_rank() == failing:
            raise RuntimeError("out of something")
        try:
            return parallel(batch)
        except PeerFailed as error:
            heard.append(str(error))
            raise

    batch = probe_models.make_batch()
    return str(check_parallel_model(alone, may_fail, batch, group, labels=None)), heard


def every_rank_fails() -> tuple[str, list[str]]:
    """The report where all ranks raise at once, and what each is warned of."""
    group = dist.new_group(list(range(dist.get_world_size())))

    def failing(batch: Any) -> ModelRun:
        raise RuntimeError("out of something")

    batch = probe_models.make_batch()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = str(check_parallel_model(failing, failing, batch, group, labels=None))
    return report, [str(each.message) for each in warned]


def one_fails_before_a_collective() -> tuple[str, list[str]]:
    """The report where rank 1 raises, and rank 0 waits for it in torch's own all_reduce; and what
    each is warned of, in order."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    alone, parallel = probe_models.models(Layout.contiguous(probe_models.TOKENS, 2), group)

    def summed(batch: Mapping[str, Tensor]) -> ModelRun:
        run = parallel(batch)
        if dist.get_rank() == 1:
            raise RuntimeError("out of something")
        dist.all_reduce(torch.ones(1), group=group)
        return run

    batch = probe_models.make_batch()
    with (
        mock.patch.dict(os.environ, {"SEQSHARD_PATIENCE": "1"}),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        report = str(check_parallel_model(alone, summed, batch, group, labels=None))
    return report, [str(each.message) for each in warned]


def as_the_page_has_it(code: str) -> str:
    """What a script prints that makes its own process group."""
    said = io.StringIO()
    with mock.patch.object(dist, "init_process_group"), contextlib.redirect_stdout(said):
        exec(compile(code, "block", "exec"), {"__name__": "probe"})  # the pool's group is there
    return said.getvalue()


def different_batches() -> str:
    """What is said where ranks are given different batches."""
    alone, parallel = probe_models.models(Layout.contiguous(24, 2), dist.group.WORLD)
    batch = probe_models.make_batch()
    batch["input_ids"] = (batch["input_ids"] + dist.get_rank()) % probe_models.VOCAB
    try:
        check_parallel_model(alone, parallel, batch, dist.group.WORLD)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""
