"""Jobs for ``api/test_hybrid_models.py``; see ``ranks.Pool``."""

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


def parallelized(name: str, policy: Any, packed: bool) -> tuple[Answer, Answer, str]:
    """Loss and gradients on this rank alone, cut by hand over one rank, and by the engine; and the
    engine's plan."""
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
        module = parallelize(Loss(model), given, policy, ComputeConfig(ranks, ranks))
        loss = module(**given)
        loss.backward()
    module.sync_grad()
    grads = whole(hf_models.gradients(module))
    found = {"loss": loss.detach(), **{n.removeprefix("model."): t for n, t in grads.items()}}
    del alone["logits"]
    return on_cpu(alone), on_cpu(found), str(module.plan)
