"""The contestants: ways of spreading a Llama's training step over GPUs.

Each keeps fp32 parameters and Adam's state, computes in bf16, adds gradients up in fp32, and starts
from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from shared.llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from annotations import ComputeConfig, parallelize
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout, wrap_zigzag_attn_func

Inputs = dict[str, Tensor]
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        config: of the model.
        inputs: forward's arguments for each sequence, [1, tokens] each; as many as there are ranks.
        dtype: the compute dtype; parameters are fp32.
    """

    config: LlamaConfig
    inputs: list[Inputs]
    dtype: torch.dtype

    def model(self, device: torch.device, **changes: Any) -> Llama:
        """A new model, the same on every rank at each call."""
        torch.manual_seed(0)
        with torch.device(device):
            return Llama(replace(self.config, **changes))


@dataclass(frozen=True)
class Trainer:
    """A way to train.

    Attributes:
        make: makes a task's step on this rank, which returns the loss of its tokens.
        sequences: how many sequences one step takes, given the number of ranks.
    """

    name: str
    make: Callable[[Task, Ranks], Step]
    sequences: Callable[[int], int] = lambda _: 1


def _engine(policy: str = "cp", **options: Any) -> Callable[[Task, Ranks], Step]:
    """``parallelize`` of the model as it is."""

    def make(task: Task, ranks: Ranks) -> Step:
        config = ComputeConfig(ranks.size, ranks.size, use_async_reducer=True)
        [first, *_] = task.inputs
        model = parallelize(
            task.model(ranks.device), first, policy, config, compute_dtype=task.dtype, **options
        )
        if ranks.rank == 0:
            print(model.plan, flush=True)
        return _step(model, first, model.sync_grad)

    return make


def sharded(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> nn.Module:
    """FSDP2 of a model, block by block, over all ranks."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(part, mesh=_mesh(ranks), mp_policy=policy)
    return model


def _fsdp(task: Task, ranks: Ranks, **changes: Any) -> nn.Module:
    return sharded(task.model(ranks.device, **changes), ranks, task.dtype)


def _whole_sequences(task: Task, ranks: Ranks) -> Step:
    """FSDP2 alone: every rank has a sequence of its own."""
    return _step(_fsdp(task, ranks), task.inputs[ranks.rank])


def _own_tokens(task: Task, ranks: Ranks) -> Step:
    """FSDP2, and attention that is called with a group: tokens in zigzag shards."""
    tokens = task.inputs[0]["tokens"].shape[1]
    layout = Layout.zigzag(tokens, ranks.size)

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        return wrap_zigzag_attn_func(q, k, v, process_group=ranks.group, layout=layout)

    own = {name: layout.shard(t, ranks.rank) for name, t in task.inputs[0].items()}
    # A mean over a rank's tokens, then FSDP's mean over ranks, which hold equally many tokens.
    return _step(_fsdp(task, ranks, op=attend), own)


def _torch_context_parallel(task: Task, ranks: Ranks) -> Step:
    """FSDP2, and PyTorch's own context manager around forward and backward."""
    from torch.distributed.tensor.experimental import context_parallel

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        heads = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(heads, 2) for t in (k, v))
        each = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*each, is_causal=True).transpose(1, 2)

    model = _fsdp(task, ranks, op=attend)
    optimizer, mesh = adam(model), _mesh(ranks)

    def step() -> Tensor:
        cut = [t.clone() for t in task.inputs[0].values()]  # the manager changes them in place
        names = list(task.inputs[0])
        with (
            context_parallel(mesh, buffers=cut, buffer_seq_dims=[1] * len(cut)),
            sdpa_kernel([SDPBackend.CUDNN_ATTENTION]),
        ):
            loss = model(**dict(zip(names, cut, strict=True)))
            loss.backward()
        update(optimizer)
        return loss.detach()

    return step


def _step(
    model: nn.Module, inputs: Mapping[str, Tensor], sync: Callable[[], None] = lambda: None
) -> Step:
    """A step that trains on ``inputs``; ``sync`` adds gradients up where backward does not."""
    optimizer = adam(model)

    def step() -> Tensor:
        loss = model(**inputs)
        loss.backward()
        sync()
        update(optimizer)
        return loss.detach()

    return step


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def update(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step, after which there are no gradients."""
    optimizer.step()
    optimizer.zero_grad()


@cache
def _mesh(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh(ranks.device.type, (ranks.size,))


TRAINERS = [
    Trainer("parallelize", _engine()),
    Trainer("parallelize auto", _engine(policy="auto")),
    Trainer("parallelize eager DTensor", _engine(lowered=False)),
    Trainer("FSDP2 + wrap_zigzag_attn_func", _own_tokens),
    Trainer("FSDP2 + context_parallel", _torch_context_parallel),
    Trainer("FSDP2", _whole_sequences, sequences=lambda ranks: ranks),
    Trainer("parallelize compiled", _engine(compile=True)),
]
