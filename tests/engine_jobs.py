"""Jobs for the engine tests; see ``ranks.Pool``."""

from __future__ import annotations

import torch
from torch import Tensor
from train_llama import Llama, LlamaConfig

from annotations import ComputeConfig, parallelize


def tiny_llama(op: str, layers: int = 2) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(dim=32, layers=layers, heads=4, kv_heads=2, hidden=48, vocab=64, op=op)
    return Llama(config).double()


def sample(op: str, batch: int, length: int, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (batch, length), generator=g)
    targets = torch.randint(64, (batch, length), generator=g)
    targets[:, length // 2 :] = -100  # only the first shard's tokens count
    given = dict(
        tokens=tokens, targets=targets, position_ids=torch.arange(length).expand(batch, -1)
    )
    if op == "varlen":
        cut = torch.tensor([0, length // 5, length // 5, length // 2 + 3, length, length])
        given["cu_seqlens"] = cut.int()
    return {k: v.contiguous() for k, v in given.items()}


def loss_and_gradients(op, policy, plan, world, batch, length):
    model = tiny_llama(op)
    parallel = parallelize(model, sample(op, batch, length), policy, ComputeConfig(plan, world))
    copies = world // plan
    copy = torch.distributed.get_rank() // plan
    given = sample(op, batch, length, seed=1 + copy)
    loss = parallel(**given)
    (loss / copies).backward()
    parallel.sync_grad()
    return loss.item(), {n: p.grad for n, p in parallel.named_parameters()}, str(parallel.plan)
