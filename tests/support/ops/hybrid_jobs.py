"""Jobs for ``api/transformers/test_hybrid_models.py``; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any

import hf_jobs
import hf_models
import hybrid_models
import torch
import torch.distributed as dist
from hf_jobs import Answer, Loss, on_cpu, whole
from rank_groups import device

from annotations import ComputeConfig, parallelize
from annotations.engines.torch import Link, Rates

SLOW = {
    "hoist": True,
    "rates": Rates(
        attention_flops_per_second=1e6, memory_bytes_per_second=1e12, links=(Link(0.0, 1e7),)
    ),
}


def parallelized(
    name: str, policy: Any, packed: bool, two_orders: bool
) -> tuple[Answer, Answer, str]:
    """Loss and gradients on this rank alone, cut by hand over one rank, and by the engine; and the
    engine's plan.

    Args:
        two_orders: plan as for ranks to which attention's even work, and bytes, are worth much.
    """
    model = hybrid_models.tiny(name).to(device())
    model.set_attn_implementation("seqshard")
    given = hf_models.batch("plain", 1 if packed else 2)
    if packed:
        ends = torch.tensor([0, 3, 4, 14, 22], dtype=torch.int32)
        given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    given = {name: t.to(device()) for name, t in given.items()}
    ranks = dist.get_world_size()
    with hybrid_models.in_fp64(model):
        alone = hf_jobs.cut(model, given, None, "contiguous")
        config = ComputeConfig(ranks, ranks, pas_config=SLOW if two_orders else {})
        module = parallelize(Loss(model), given, policy, config)
        loss = module(**given)
        loss.backward()
    module.sync_grad()
    grads = whole(hf_models.gradients(module))
    found = {"loss": loss.detach(), **{n.removeprefix("model."): t for n, t in grads.items()}}
    del alone["logits"]
    return on_cpu(alone), on_cpu(found), str(module.plan)
