"""The norm of a model's gradients over all of their parts, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..strategies.placements import cut_axes
from .gradient_sync import local


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    A plain tensor is whole, the same on every rank, and counts once. Of a DTensor each rank has
    what its placements say.

    Args:
        norm_type: p of the p-norm, above 0; ``inf`` for the largest absolute value.
    Returns:
        A scalar, fp32 (fp64 where a gradient is).
    """
    if not grads:
        return torch.zeros(())
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    # Of gradients that lie alike the ranks need to tell each other only one number.
    alike: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        part = local(grad)
        # The largest of nothing is an error in torch; some rank's part may be empty.
        norm = part.new_zeros((), dtype=dtype)
        if part.numel():
            norm = torch.linalg.vector_norm(part, norm_type, dtype=dtype)
        alike.setdefault(_cut_over(grad), []).append(norm.double())
    sums = [
        _over_ranks(_joined(torch.stack(norms), norm_type), where, norm_type)
        for where, norms in alike.items()
    ]
    total = _joined(torch.stack(sums), math.inf) if math.isinf(norm_type) else sum(sums)
    assert isinstance(total, Tensor)
    return (total if math.isinf(norm_type) else total ** (1 / norm_type)).to(dtype)


def _joined(norms: Tensor, norm_type: float) -> Tensor:
    """The largest, or the sum of the norms' powers."""
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _over_ranks(
    power: Tensor, where: tuple[DeviceMesh, tuple[int, ...]] | None, norm_type: float
) -> Tensor:
    if where is not None:
        mesh, axes = where
        operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        for axis in axes:
            dist.all_reduce(power, operation, group=mesh.get_group(axis))
    return power


def _cut_over(grad: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh axes whose ranks hold different parts; None where this rank holds all of it."""
    axes = cut_axes(grad)
    return (grad.device_mesh, axes) if axes else None  # type: ignore[attr-defined]


@torch.no_grad()
def clip(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients, in place, so that their norm is at most ``max_norm``; as torch does it."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local(grad).mul_(scale.to(grad.device))
