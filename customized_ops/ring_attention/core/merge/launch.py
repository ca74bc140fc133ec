"""Launches the kernels over rows with little work on the host.

Triton looks at every argument of every call to find the variant that fits. Here the variants are
few and known: the first call of one goes through Triton, later ones straight to what it compiled.
Nothing waits for the device, and a CUDA graph may capture all but the first call of a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tape import launch, refuse
from ..triton_launch import Grid, Launch, launch_of
from . import triton_kernels as kernels

VECTOR_ELEMENTS = kernels.VECTOR.value
TILE_ELEMENTS = 4096  # of one tensor in one program: 4 loads of 16 bytes a thread in 2-byte dtypes
LSE_ROWS = 8  # neighbouring rows of a program: 32 bytes of lse, the least that memory hands out
MOST_MOVED = 3  # the most tensors in one launch
DTYPES = {torch.bfloat16, torch.float16, torch.float32}


class _Tile(NamedTuple):
    """The tile of a program, and the constants that a variant is compiled for."""

    rows: int
    head_tiles: int  # tiles that hold the heads of a row
    constants: tuple[Any, ...]


_variants: dict[tuple[Any, ...], Launch] = {}


def compiled() -> int:
    """How many variants were compiled so far."""
    return len(_variants)


def warm_up(heads: int, dims: set[int], like: Tensor) -> Iterator[None]:
    """Compile, one after the other, the variants that passes over up to ``heads`` heads can need.

    Args:
        dims: head dims of q, k and v.
        like: of the dtype and on the device of q, k and v.
    """
    powers = range(_power_of_two(heads).bit_length())
    tiles = {_tiled(1 << n, dim).constants: (1 << n, dim) for n in powers for dim in dims}
    dtypes = like.dtype, torch.float32
    indices = torch.zeros(1, dtype=torch.int64, device=like.device)
    ends_of_sums = torch.arange(2, device=like.device)

    def rows(count: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
        return [like.new_zeros((1, 1, heads, dim), dtype=dtype) for _ in range(count)]

    ends = (indices, None), (None, indices), (indices, indices)
    for some, dim in tiles.values():
        for source, target, count in product(dtypes, dtypes, range(1, MOST_MOVED + 1)):
            both = rows(count, some, dim, source), rows(count, some, dim, target)
            if count == MOST_MOVED and (source, target) != (like.dtype, like.dtype):
                continue  # only dout, q and out travel together
            for from_rows, to_rows in ends:
                move(*both, from_rows, to_rows)
                yield
            add(*both, indices)
            yield
            add(*both, indices, ends_of_sums, indices)
            yield
        for out, part, places in product(dtypes, dtypes, (None, indices)):
            lses = [like.new_zeros((1, some, 1), dtype=torch.float32) for _ in range(2)]
            (total,), (arrived,) = rows(1, some, dim, out), rows(1, some, dim, part)
            merge(total, lses[0], arrived, lses[1], places)
            yield


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors of rows, [b, l, h, d]: a dense, aligned d of a dtype
    that is added up in fp32, whatever the other strides."""
    for t in tensors:
        b, l, h, dense = t.stride()
        # The bitwise or of multiples of a power of two is a multiple of it, too.
        if (b | l | h | t.shape[3]) % VECTOR_ELEMENTS or t.data_ptr() % 16 or dense != 1:
            return False
        if t.dtype not in DTYPES:
            return False
    return True


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """See :func:`..merge.merge_`; ``out`` and ``part`` fit, lse is fp32."""
    numbers = (*_vectors(out), *_vectors(part), *lse.stride(), *part_lse.stride())
    _launch(kernels.merge, part.shape, (out, part, lse, part_lse, rows), numbers)


def move(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    from_rows: Tensor | None,
    to_rows: Tensor | None,
) -> None:
    """Copy rows of each source over rows of its target; see :func:`.copy_rows`. There are at most
    MOST_MOVED tensors, which all fit and have the same b, h and d. One or both of the indices are
    given."""
    rows = to_rows if from_rows is None else from_rows
    assert rows is not None
    _launch_pairs(kernels.move, sources, targets, len(rows), (from_rows, to_rows))


def add(
    parts: Sequence[Tensor],
    totals: Sequence[Tensor],
    tokens: Tensor,
    starts: Tensor | None = None,
    order: Tensor | None = None,
    most: int = 1,
) -> None:
    """Add row i of each part to row tokens[i] of its sum; or, given the rest, the rows that
    :func:`.rows.sum_rows` says. For the tensors see :func:`move`."""
    _launch_pairs(kernels.add, parts, totals, len(tokens), (tokens, starts, order), most)


def _launch_pairs(
    kernel: Any,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    count: int,
    tables: Sequence[Tensor | None],
    *numbers: int,
) -> None:
    """Launch a kernel over so many rows of up to MOST_MOVED sources and their targets."""
    both = [t for pair in zip(sources, targets, strict=True) for t in pair]
    absent = 2 * MOST_MOVED - len(both)
    strides = [stride for t in both for stride in _vectors(t)] + [0, 0, 0] * absent
    b, _, heads, dim = targets[0].shape
    tensors = *both, *[None] * absent, *tables
    _launch(kernel, (b, count, heads, dim), tensors, (*numbers, *strides))


def _vectors(t: Tensor) -> tuple[int, int, int]:
    """Strides of b, l and h in vectors."""
    b, l, h, _ = t.stride()
    return b // VECTOR_ELEMENTS, l // VECTOR_ELEMENTS, h // VECTOR_ELEMENTS


def _launch(
    kernel: Any,
    shape: Sequence[int],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
) -> None:
    """Launch a kernel, on the current stream of the first tensor's device, over a ``shape`` of b,
    rows, heads and d. The rest are the kernel's arguments, without sizes and those of a tile."""
    b, length, heads, dim = shape
    if 0 in shape:
        return
    assert tensors[0] is not None
    device = tensors[0].device  # what is written may be in a peer's memory
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        refuse()
        with torch.cuda.device(device):
            _launch(kernel, shape, tensors, numbers)
        return
    dtypes = [None if t is None else t.dtype for t in tensors]
    tile_rows, head_tiles, constants = _tiled(heads, dim)
    grid = (-(-length // tile_rows) * head_tiles, b, 1)
    key = (id(kernel), device, *constants, *dtypes)
    variant = _variants.get(key)
    if variant is None:
        refuse()
        variant = kernel[grid](*tensors, length, heads, *numbers, *constants)
        if variant is not None:  # None where kernels are interpreted
            _variants[key] = launch_of(variant, device.index)
    else:
        launch(_run, variant, grid, len(tensors), *tensors, length, heads, *numbers, *constants)


def _run(variant: Launch, grid: Grid, count: int, *arguments: Any) -> None:
    """Launch a compiled variant; the first ``count`` of its arguments are tensors."""
    addresses = [None if t is None else t.data_ptr() for t in arguments[:count]]
    variant(grid, *addresses, *arguments[count:])


@cache
def _tiled(heads: int, dim: int) -> _Tile:
    block = _power_of_two(dim)
    tile_pairs = max(TILE_ELEMENTS // block, 1)
    tile_heads = min(_power_of_two(heads), max(tile_pairs // LSE_ROWS, 1))
    tile_rows = tile_pairs // tile_heads
    return _Tile(tile_rows, -(-heads // tile_heads), (dim, block, tile_rows, tile_heads))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
