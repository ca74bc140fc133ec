"""The example's Llama, trained through each engine: a job for ranks over gloo or NCCL."""

from __future__ import annotations

from typing import Any

import nnscaler
import torch
import torch.distributed as dist
from shared.llama import Llama, LlamaConfig, inputs
from shared.text_corpus import PackedText, load_documents
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize

from .jobs import generated, moved, world

LEARNING_RATE = 3e-4
PLANNING = {"parallel_profile": False, "use_bf16": True}
ADAM: dict[str, Any] = {"lr": LEARNING_RATE, "eps": 1e-6}


class Norm(nn.Module):
    """RMS norm in ops that nnscaler knows; it has no annotation for ``torch.rms_norm``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(torch.mean(x * x, dim=2, keepdim=True) + 1e-6) * self.weight


def llama(config: LlamaConfig) -> nn.Module:
    """The example's, the same at each call."""
    torch.manual_seed(0)
    model = Llama(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.RMSNorm):
            model.set_submodule(name, Norm(config.dim))
    return model


def losses(
    engine: str, config: LlamaConfig, length: int, steps: int, dtype: torch.dtype, policy: str
) -> list[float]:
    """The loss of each step. ``engine`` "alone" is plain torch, on every rank the whole."""
    text = PackedText(load_documents(), length)
    with world() as device:
        model = llama(config).to(device, dtype)
        example = moved(inputs(text.batch(0, packed=False), config.op), device)
        compute = ComputeConfig(
            dist.get_world_size(),
            trace_strategy=device.type,
            pas_config=PLANNING if policy == "cp" and engine == "nnscaler" else {},
        )
        if engine == "nnscaler":
            with generated() as where:
                cut = parallelize(model, example, policy, compute, engine=engine, **where)
            optimizer = nnscaler.build_optimizer(cut, torch.optim.AdamW, **ADAM)
        elif engine == "torch":
            cut = parallelize(model, example, policy, compute, engine=engine)
            optimizer = torch.optim.AdamW(cut.parameters(), **ADAM)
        else:
            cut, optimizer = model, torch.optim.AdamW(model.parameters(), **ADAM)
        found = []
        for step in range(steps):
            given: dict[str, Tensor] = moved(
                inputs(text.batch(step, packed=False), config.op), device
            )
            loss = cut(**given)
            loss.backward()
            if engine == "torch":
                cut.sync_grad()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found
