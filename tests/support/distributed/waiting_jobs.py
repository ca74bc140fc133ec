"""Jobs that train on packed documents, new in every step, while torch refuses whatever makes the
host wait for the GPU; see ``ranks.Pool``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_groups import device, in_their_own_time
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize
from customized_ops.ring_attention import (
    PackDocuments,
    PackedBatch,
    group_costs,
    warm_up,
    wrap_ring_attn_varlen_func,
)

HEADS, DIM, VOCABULARY = (8, 2), 64, 128
TOKENS = {"cuda": 8192, "cpu": 256}  # of each batch
DOCUMENTS = 24  # of each batch: a graph takes up to so many
Step = Callable[[PackedBatch], None]


class Model(nn.Module):
    """Two layers of attention over packed documents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS[0] * DIM
        self.embedding = nn.Embedding(VOCABULARY, width)
        projected = (HEADS[0] + 2 * HEADS[1]) * DIM
        self.into = nn.ModuleList(nn.Linear(width, projected) for _ in range(2))
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, where: Any) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.into:
            q, k, v = layer(x).unflatten(-1, (-1, DIM)).split((HEADS[0], HEADS[1], HEADS[1]), 1)
            y = wrap_ring_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, causal=True, **where)
            assert isinstance(y, Tensor)
            x = x + y.flatten(1)
        return F.cross_entropy(self.out(x).float(), targets, reduction="sum")


class Alone(Model):
    """The same without a group, for the engine."""

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, targets, cu_seqlens, {})


def _pack(**how: Any) -> PackDocuments:
    size, rank, costs = dist.get_world_size(), dist.get_rank(), group_costs(dist.group.WORLD)
    return PackDocuments(size, rank, HEADS, head_dim=DIM, costs=costs, **how)


def _called() -> tuple[Step, PackDocuments]:
    model = Model().to(device(), torch.bfloat16)

    def step(batch: PackedBatch) -> None:
        where = {"process_group": dist.group.WORLD, "layout": batch.layout}
        model(batch.tokens, batch.targets, batch.cu_seqlens, where).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        model.zero_grad()

    return step, _pack()


def _parallelized() -> tuple[Step, PackDocuments]:
    size = dist.get_world_size()
    model = Alone().to(device(), torch.bfloat16)
    (first,) = _batches(_pack(whole=True), [0])
    config = ComputeConfig(size, size, pas_config={"hoist": True})
    module = parallelize(model, _arguments(first.to(device())), "cp", config)

    def step(batch: PackedBatch) -> None:
        module(**_arguments(batch)).backward()
        module.sync_grad()
        module.zero_grad()

    return step, _pack(whole=True, layout=module.plan.packed_layout)


def _arguments(batch: PackedBatch) -> dict[str, Tensor]:
    return {"tokens": batch.tokens, "targets": batch.targets, "cu_seqlens": batch.cu_seqlens}


def _hugging_face() -> tuple[Step, PackDocuments]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from customized_ops.ring_attention.api import transformers as seqshard

    seqshard.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS[0] * DIM,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=HEADS[0],
        num_key_value_heads=HEADS[1],
        vocab_size=VOCABULARY,
        attn_implementation="seqshard",
    )
    model: Any = LlamaForCausalLM(config).to(device(), torch.bfloat16)

    def step(batch: PackedBatch) -> None:
        shard = seqshard.shard_batch(batch, dist.group.WORLD)
        with shard.context():
            loss = model(**shard.inputs).loss
        loss.backward()
        seqshard.sum_gradients(model, dist.group.WORLD)
        model.zero_grad()

    return step, _pack()


ROUTES = {"call": _called, "parallelize": _parallelized, "Hugging Face": _hugging_face}


def _batches(pack: PackDocuments, seeds: Any) -> Iterator[PackedBatch]:
    """As many documents and tokens in each, of other lengths."""
    for seed in seeds:
        draw, total = np.random.default_rng(seed), TOKENS[device()]
        ends = np.sort(draw.choice(np.arange(1, total), DOCUMENTS - 1, replace=False))
        ids = draw.integers(0, VOCABULARY, total)
        batch = pack(np.split(ids, ends))
        yield batch.pin_memory() if device() == "cuda" else batch


@in_their_own_time
def steps_without_waiting(route: str, warm: int, steps: int) -> list[str]:
    """What is wrong with ``steps`` steps of new batches after ``warm`` others. On CPUs, where
    nobody waits, only whether they run."""
    step, pack = ROUTES[route]()
    for batch in _batches(pack, range(warm)):
        step(batch.to(device()))
    new = list(_batches(pack, range(warm, warm + steps)))
    if device() != "cuda":
        for batch in new:
            step(batch)
        return []
    warm_up(TOKENS["cuda"], heads=HEADS, head_dim=DIM, process_group=dist.group.WORLD)
    probe = torch.ones((), device=device())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in new:
            step(batch.to(device()))
        try:
            probe.item()
        except RuntimeError:
            return []
        return ["a wait was not noticed"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
