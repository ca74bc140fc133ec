"""Moving and adding up rows by index, in one kernel where that is faster.

The torch path of each function is its definition. On a CUDA device with Triton one kernel does the
same for several tensors of [b, l, h, d], and reads and writes each element once. Ranges of rows
need no kernel of ours: torch's ``copy_`` and ``add_`` are one kernel, which converts, or adds mixed
dtypes in fp32 and rounds once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..index_table import IndexTable
from ..tape import launch


def copy_rows(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    dims: Sequence[int],
    from_rows: Tensor | None = None,
    to_rows: Tensor | None = None,
) -> None:
    """Copy row from_rows[i] of each source over row to_rows[i] of its target, in its dtype.

    Args:
        sources, targets: of the same shape but for rows; strides and dtypes may differ. They share
            no memory.
        dims: which dim of each pair its rows are.
        from_rows, to_rows: int64[n], on the tensors' device, no row of a target twice; None is all
            rows, in order.
    """
    if from_rows is None and to_rows is None:
        for source, target in zip(sources, targets, strict=True):
            launch(Tensor.copy_, target, source)
        return
    for kernels, some, places, dim in _grouped(sources, targets, dims):
        if kernels is not None:
            kernels.move(some, places, from_rows, to_rows)
        else:
            launch(_copy_torch, some[0], places[0], dim, from_rows, to_rows)


def add_rows(
    parts: Sequence[Tensor], totals: Sequence[Tensor], dims: Sequence[int], rows: Tensor | None
) -> None:
    """Add row i of each part to row rows[i] of its sum, in place; see :func:`copy_rows`. Each
    element is added in fp32 (fp64 where either is) and rounded to the sum's dtype once."""
    if rows is None:
        for part, total in zip(parts, totals, strict=True):
            launch(Tensor.add_, total, part)
        return
    for kernels, some, sums, dim in _grouped(parts, totals, dims):
        if kernels is not None:
            kernels.add(some, sums, rows)
        else:
            launch(_add_torch, some[0], sums[0], dim, rows)


def sum_rows(
    parts: Sequence[Tensor],
    totals: Sequence[Tensor],
    dims: Sequence[int],
    tables: Sequence[IndexTable],
    most: int,
) -> bool:
    """Add rows of each part to row tokens[i] of its sum, in place: rows order[starts[i]] to
    order[starts[i + 1] - 1], in fp32 and in this order, and round once. Returns False, and has done
    nothing, where no kernel can.

    Args:
        tables: tokens, int64[t], each once; starts, int64[t + 1]; and order, int64[rows].
        most: the largest number of rows of a token.
    """
    groups = list(_grouped(parts, totals, dims))
    if any(kernels is None for kernels, *_ in groups):
        return False
    on_device = [table.on(parts[0].device) for table in tables]
    for kernels, some, places, _ in groups:
        assert kernels is not None, "each group has its kernels"
        kernels.add(some, places, *on_device, most)
    return True


def on_gpu(*tensors: Tensor) -> ModuleType | None:
    """The module that launches the kernels, where they take these tensors of rows; else None."""
    for t in tensors:
        if not t.is_cuda or t.dim() != 4:
            return None
    kernels = _kernels()
    return kernels if kernels is not None and kernels.fits(*tensors) else None


def compiled() -> int:
    """How many variants of the kernels were compiled in this process."""
    kernels = _kernels()
    return 0 if kernels is None else int(kernels.compiled())


def warm_up(heads: int, dims: set[int], like: Tensor) -> Iterator[None]:
    """:func:`.launch.warm_up`, where the kernels take such tensors. Also runs torch's own, which
    move rows of lse [b, h, l]: a GPU loads them when they first run, and the host waits for that
    (67 ms, once on an H200)."""
    for count in (1, 64):  # torch has a kernel of its own for few rows
        given = like.new_zeros((1, heads, count), dtype=torch.float32)
        every = torch.arange(count, device=like.device)
        for ends in ((every, None), (None, every), (every, every)):
            copy_rows([given], [given.clone()], [2], *ends)
        add_rows([given], [given.clone()], [2], every)
    kernels = _kernels()
    if kernels is not None and on_gpu(*(like.new_empty((1, 1, 1, dim)) for dim in dims)):
        yield from kernels.warm_up(heads, dims, like)


@cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from . import launch as kernels

    return kernels


Group = tuple[ModuleType | None, list[Tensor], list[Tensor], int]


def _grouped(
    sources: Sequence[Tensor], targets: Sequence[Tensor], dims: Sequence[int]
) -> Iterator[Group]:
    """Groups of pairs: those that one launch moves, after the module that launches it; or, after
    None, a single pair that torch moves. The dim of their rows comes last."""
    group: Group = (None, [], [], 1)
    for source, target, dim in zip(sources, targets, dims, strict=True):
        kernels = on_gpu(source, target) if dim == 1 else None
        if kernels is None:
            yield None, [source], [target], dim
            continue
        _, some, places, _ = group
        if some and (len(some) == kernels.MOST_MOVED or _shape(source) != _shape(some[0])):
            yield group
            some, places = [], []
        group = kernels, [*some, source], [*places, target], 1
    if group[1]:
        yield group


def _shape(rows: Tensor) -> tuple[int, ...]:
    """b, h and d of a tensor of rows."""
    return (rows.shape[0], *rows.shape[2:])


def _add_torch(part: Tensor, total: Tensor, dim: int, rows: Tensor) -> None:
    if part.dtype == total.dtype or part.itemsize < total.itemsize:
        total.index_add_(dim, rows, part.to(total.dtype))
    else:
        total.index_copy_(dim, rows, total.index_select(dim, rows).add_(part))


def _copy_torch(
    source: Tensor, target: Tensor, dim: int, from_rows: Tensor | None, to_rows: Tensor | None
) -> None:
    if from_rows is not None and to_rows is None and source.dtype == target.dtype:
        torch.index_select(source, dim, from_rows, out=target)
        return
    part = source if from_rows is None else source.index_select(dim, from_rows)
    if to_rows is None:
        target.copy_(part)
    else:
        target.index_copy_(dim, to_rows, part.to(target.dtype))
