"""The norm of a model's gradients over all of their parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..strategies.placements import cut_axes
from .gradient_sync import local


@torch.no_grad()
def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    torch's own ``get_total_norm`` takes no DTensors beside plain tensors, no empty part for
    ``inf``, and measures bf16 gradients in bf16.

    Args:
        grads: plain tensors, which are the same on every rank, and DTensors.
        norm_type: p of the p-norm, above 0; ``inf`` for the largest absolute value.
    Returns:
        A scalar, fp32 (fp64 where a gradient is).
    """
    if not grads:
        return torch.zeros(())
    largest = math.isinf(norm_type)
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    # Ranks exchange one number for all gradients that are cut over the same axes of a mesh.
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        part, axes = local(grad), cut_axes(grad)
        norm = part.new_zeros((), dtype=dtype)
        if part.numel():  # torch has no largest element of nothing
            norm = torch.linalg.vector_norm(part, norm_type, dtype=dtype)
        key = (grad.device_mesh, axes) if isinstance(grad, DTensor) and axes else (None, ())
        groups.setdefault(key, []).append(norm.double())
    powers = []
    for (mesh, axes), norms in groups.items():
        power = torch.stack(norms).max() if largest else (torch.stack(norms) ** norm_type).sum()
        if mesh is not None:
            partial = Partial("max" if largest else "sum")
            places = [partial if axis in axes else Replicate() for axis in range(mesh.ndim)]
            power = DTensor.from_local(power, mesh, places, run_check=False).full_tensor()
        powers.append(power)
    total = torch.stack(powers)
    return (total.max() if largest else total.sum() ** (1 / norm_type)).to(dtype)
