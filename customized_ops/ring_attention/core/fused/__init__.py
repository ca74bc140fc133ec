"""Moving and adding up rows of [b, l, h, d] by index, in one kernel where that is faster.

What each function does is its plain torch path; on a CUDA device with Triton installed the same is
done by one kernel, which reads and writes each element once. Adding a part to a range of rows needs
nothing here: torch's ``add_`` is one kernel already, which adds a narrow dtype to a wide one, or
the reverse, in fp32 and rounds once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def take_rows(
    tensors: Sequence[Tensor], rows: Tensor, out: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Copy the given rows of each tensor.

    Args:
        tensors: each [b, l, h, d], or [b, h, l] as lse is, any strides and dtype.
        rows: int64[n], on the tensors' device.
        out: each [b, n, h, d] or [b, h, n], of its tensor's dtype, and no part of one of
            ``tensors``; any strides. None makes them.
    Returns:
        ``out``.
    """
    if out is None:
        out = [t.new_empty(_with_rows(t, len(rows))) for t in tensors]
    for sources, targets, kernels in _grouped(tensors, out):
        if kernels is not None:
            kernels.copy(sources, targets, rows, take=True)
        else:
            torch.index_select(sources[0], _rows_dim(sources[0]), rows, out=targets[0])
    return list(out)


def put_rows(tensors: Sequence[Tensor], parts: Sequence[Tensor], rows: Tensor) -> None:
    """Copy row i of each part over row rows[i] of its tensor.

    Args:
        tensors: each [b, l, h, d], or [b, h, l] as lse is, any strides and dtype.
        parts: each [b, n, h, d] or [b, h, n], of its tensor's dtype.
        rows: int64[n], on the tensors' device, no row twice.
    """
    for sources, targets, kernels in _grouped(parts, tensors):
        if kernels is not None:
            kernels.copy(sources, targets, rows, take=False)
        else:
            targets[0].index_copy_(_rows_dim(targets[0]), rows, sources[0])


def add_rows(total: Tensor, part: Tensor, rows: Tensor) -> None:
    """Add row i of a part to row rows[i] of a sum, in place.

    Each element is added in fp32 (fp64 where either is) and rounded to the sum's dtype once.

    Args:
        total: [b, l, h, d], any strides and dtype.
        part: [b, n, h, d], any strides and dtype.
        rows: int64[n], on the tensors' device, no row twice.
    """
    kernels = on_gpu(total, part)
    if kernels is not None:
        kernels.add(total, part, rows)
    else:
        total.index_copy_(1, rows, total.index_select(1, rows).add_(part))


def on_gpu(*tensors: Tensor) -> ModuleType | None:
    """The module that launches the kernels, where they take these tensors of rows; else None."""
    if not all(t.is_cuda and t.dim() == 4 for t in tensors):
        return None
    launch = _launch()
    return launch if launch is not None and launch.fits(*tensors) else None


@cache
def _launch() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from . import launch

    return launch


Group = tuple[list[Tensor], list[Tensor], ModuleType | None]


def _grouped(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Group]:
    """Pairs of a source and a target that one launch copies, and the module to launch with; a pair
    alone and None where torch is to copy it."""
    groups: list[Group] = []
    for source, target in zip(sources, targets, strict=True):
        kernels = on_gpu(source, target) if source.dtype == target.dtype else None
        if kernels is not None and groups:
            others, their_targets, same = groups[-1]
            if same and len(others) < same.MOST_COPIES and _alike(source, others[0]):
                others.append(source)
                their_targets.append(target)
                continue
        groups.append(([source], [target], kernels))
    return groups


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of rows have the same b, h and d."""
    return a.shape[0] == b.shape[0] and a.shape[2:] == b.shape[2:]


def _rows_dim(t: Tensor) -> int:
    """1 of [b, l, h, d], 2 of [b, h, l]."""
    return 1 if t.dim() == 4 else 2


def _with_rows(t: Tensor, count: int) -> list[int]:
    """The shape of ``t`` with so many rows."""
    shape = list(t.shape)
    shape[_rows_dim(t)] = count
    return shape
