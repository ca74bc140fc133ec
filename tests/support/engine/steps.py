"""What jobs on the embedded engine share: one step of all ranks, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from dense import assert_same
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from annotations import ComputeConfig, ParallelModule
from customized_ops.ring_attention.core.comm import comm_groups as groups


def over_all(**fields: Any) -> ComputeConfig:
    """One copy of a model, over all ranks."""
    ranks = dist.get_world_size()
    return ComputeConfig(ranks, ranks, **fields)


def step(parallel: ParallelModule, given: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of this rank's copy, and the gradients of the mean over copies."""
    loss = parallel(**given)
    (loss / parallel.compute_config.num_scale_units).backward()
    parallel.sync_grad()
    return loss.item(), gradients(parallel)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Those that there are, by name."""
    return {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def assert_gradients(
    where: str,
    got: Mapping[str, Tensor | None],
    alone: nn.Module,
    tolerance: float = 1e-10,
    least: float = 1e-6,
) -> None:
    """Gradients by name are those that a module has on one process, which are at least so large:
    a gradient of nothing compares nothing."""
    for name, parameter in alone.named_parameters():
        if parameter.grad is None:
            assert got.get(name) is None, f"{where}, {name}"
            continue
        assert parameter.grad.abs().max() >= least, f"{where}, {name}"
        assert_same(f"{where}, {name}", got[name], parameter.grad, tolerance)


def whole(x: Tensor) -> Tensor:
    """A tensor, of a DTensor all parts, on the host."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu()


def received_bytes() -> int:
    """What this rank's attention ops have received so far."""
    return sum(comm.counters.received_bytes for _, comm in groups._by_name.values())


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The error of a call, as this rank gets it."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
