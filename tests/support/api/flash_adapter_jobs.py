"""A tiny Llama of transformers over ranks, by ring_flash_attn's adapter; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_groups import device
from torch import Tensor

from customized_ops.ring_attention.api.ring_flash_attn import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name, group_name

DOCUMENTS = (5, 9, 2, 8)


def model(implementation: str, head_dim: int = 8, **options: Any) -> Any:
    """Two layers, 4 query heads on 2 key heads, in fp64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=61)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, head_dim=head_dim, **options)).double()
    # Loading it so asks for flash_attn; what runs is looked up by this name.
    made.config._attn_implementation = implementation
    return made


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [1, l], their position ids, and a weight [l, vocabulary] for each logit."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (1, sum(DOCUMENTS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS]).unsqueeze(0)
    return tokens, positions, torch.randn(sum(DOCUMENTS), 61, generator=generator).double()


def outcome(made: Any, tokens: Tensor, positions: Tensor, weight: Tensor) -> list[Tensor]:
    """Logits, and the gradients of all parameters."""
    logits = made(input_ids=tokens, position_ids=positions).logits[0]
    grads = torch.autograd.grad((logits * weight.to(logits)).sum(), list(made.parameters()))
    return [logits.detach(), *grads]


def alone() -> list[Tensor]:
    """Document by document, with transformers' own attention; on the device of the ranks, by which
    rotary angles differ that transformers takes in fp32."""
    made = model("sdpa").to(device())
    tokens, positions, weight = (t.to(device()) for t in packed())
    parts = [t.split(DOCUMENTS, n) for t, n in ((tokens, 1), (positions, 1), (weight, 0))]
    each = [outcome(made, *given) for given in zip(*parts, strict=True)]
    logits, *grads = zip(*each, strict=True)
    return [torch.cat(logits).cpu(), *(sum(g).cpu() for g in grads)]


def cut(made: Any, group: Any, stride: int) -> list[Tensor]:
    """This rank's logits, and its part of the gradients."""
    comm = comm_by_name(group_name(group))
    substitute_hf_flash_attn(group, stride)
    cu = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    update_ring_flash_attn_params(cu, group)
    tokens, positions, weight = packed()
    given = [
        t.chunk(comm.size, n)[comm.rank] for t, n in ((tokens, 1), (positions, 1), (weight, 0))
    ]
    return [t.cpu() for t in outcome(made.to(device()), *(t.to(device()) for t in given))]


def cut_over(members: tuple[int, ...], stride: int) -> list[Tensor] | None:
    """The same on some ranks of the world; None on the others."""
    group = dist.new_group(list(members))
    if dist.get_rank() not in members:
        return None
    return cut(model("flash_attention_2"), group, stride)


def cut_in_bf16(stride: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Logits and gradients of all ranks: in fp64 and in bf16 on one, and in bf16 over all."""
    made, rank = model("flash_attention_2", head_dim=64), dist.get_rank()
    truth = cut(made, [rank], stride)
    low = made.bfloat16()
    alone = cut(low, [rank], stride)
    logits, *grads = cut(low, dist.group.WORLD, stride)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (logits, grads))
    parts, all_grads = zip(*every, strict=True)
    return truth, alone, [torch.cat(parts), *(sum(g) for g in zip(*all_grads, strict=True))]
