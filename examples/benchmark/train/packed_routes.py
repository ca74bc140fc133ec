"""Three ways of training a Llama on packed documents, from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from shared.llama import Attend, Llama, LlamaConfig
from torch import Tensor

from annotations import ComputeConfig, parallelize
from benchmark.ranks import Ranks
from benchmark.train.hf_llama import HfLlama
from benchmark.train.trainers import adam, sharded, update
from customized_ops.ring_attention import PackedBatch, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.api import transformers as hugging_face

Step = Callable[[PackedBatch], Tensor]  # returns this rank's share of the loss
Made = tuple[Step, str]  # a step, and the layout for which its batches are planned


@dataclass(frozen=True)
class Route:
    """A way to train.

    Attributes:
        make: makes a step and a layout from the model's sizes, the compute dtype, the ranks and a
            batch.
        whole: whether each rank is given all tokens.
    """

    make: Callable[[LlamaConfig, torch.dtype, Ranks, PackedBatch], Made]
    whole: bool


def _called_with_a_group(
    config: LlamaConfig, dtype: torch.dtype, ranks: Ranks, _: PackedBatch
) -> Made:
    """FSDP2, and attention that is called with a group and the batch's layout."""
    current: list[PackedBatch] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        rows = (t.squeeze(0) for t in (q, k, v))
        where = {"process_group": ranks.group, "layout": current[0].layout}
        bounds = current[0].cu_seqlens
        out = wrap_ring_attn_varlen_func(*rows, bounds, bounds, causal=True, **where)
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)

    model = sharded(_llama(config, ranks, attend), ranks, dtype)
    optimizer = adam(model)

    def step(batch: PackedBatch) -> Tensor:
        current[:] = [batch]
        loss = model(batch.tokens[None], batch.targets[None], batch.positions[None])
        # The loss is a mean over this rank's targets, and FSDP averages ranks: weight by counts.
        share = loss * ((batch.targets >= 0).sum() * (ranks.size / max(batch.target_count, 1)))
        share.backward()
        update(optimizer)
        return share.detach() / ranks.size

    return step, "balanced"


def _parallelize(config: LlamaConfig, dtype: torch.dtype, ranks: Ranks, batch: PackedBatch) -> Made:
    """The model as it is, cut by the engine."""
    model = parallelize(
        _llama(config, ranks, "varlen"),
        _arguments(batch),
        "cp",
        ComputeConfig(ranks.size, ranks.size, use_async_reducer=True),
        compute_dtype=dtype,
    )
    if ranks.rank == 0:
        print(model.plan, flush=True)
    optimizer = adam(model)

    def step(batch: PackedBatch) -> Tensor:
        loss = model(**_arguments(batch))
        loss.backward()
        model.sync_grad()
        update(optimizer)
        return loss.detach() / ranks.size  # each rank has the loss of all tokens

    return step, model.plan.packed_layout


def _hugging_face(config: LlamaConfig, dtype: torch.dtype, ranks: Ranks, _: PackedBatch) -> Made:
    """FSDP2 with transformers' model, its batch cut by ``shard_batch``."""
    hugging_face.register()
    model = sharded(HfLlama.of(_llama(config, ranks, "varlen")), ranks, dtype)
    optimizer = adam(model)

    def step(batch: PackedBatch) -> Tensor:
        shard = hugging_face.shard_batch(batch, ranks.group)
        with shard.context():
            share = model(**shard.inputs)  # divided by the targets of all ranks
        (share * ranks.size).backward()  # FSDP divides by the ranks
        update(optimizer)
        return share.detach()

    return step, "balanced"


def _llama(config: LlamaConfig, ranks: Ranks, attend: str | Attend) -> Llama:
    torch.manual_seed(0)
    with torch.device(ranks.device):
        return Llama(replace(config, op=attend))


def _arguments(batch: PackedBatch) -> dict[str, Tensor]:
    """The arguments of the Llama's ``forward``."""
    named = {"tokens": batch.tokens, "targets": batch.targets, "position_ids": batch.positions}
    return {**{n: t[None] for n, t in named.items()}, "cu_seqlens": batch.cu_seqlens}


ROUTES = {
    "FSDP2 + wrap_ring_attn_varlen_func": Route(_called_with_a_group, whole=False),
    "parallelize": Route(_parallelize, whole=True),
    "FSDP2 + Hugging Face, shard_batch": Route(_hugging_face, whole=False),
}
