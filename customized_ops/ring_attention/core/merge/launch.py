"""Launches the kernels over rows with little work on the host.

Triton looks at every argument of every call to find the variant that fits. Here the variants are
few and known: the first call of one goes through Triton, later ones straight to what it compiled.
Nothing waits for the device, and a CUDA graph may capture all but the first call of a variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import triton_kernels as kernels

VECTOR_ELEMENTS = kernels.VECTOR.value
TILE_ELEMENTS = 4096  # of one tensor in one program: 4 loads of 16 bytes a thread in 2-byte dtypes
LSE_ROWS = 8  # neighbouring rows of a program: 32 bytes, the least that memory hands out, of lse
MOST_MOVED = 3  # tensors in one launch
DTYPES = {torch.bfloat16, torch.float16, torch.float32}


class _Tile(NamedTuple):
    """The tile of a program, and the constants that a variant is compiled for."""

    rows: int
    head_tiles: int  # that hold the heads of a row
    constants: tuple[Any, ...]


_variants: dict[tuple[Any, ...], Any] = {}


def compiled() -> int:
    """How many variants were compiled so far."""
    return len(_variants)


def warm_up(q_heads: int, kv_heads: int, dims: tuple[int, int], like: Tensor) -> None:
    """Compile what passes over tokens in any order can need.

    Args:
        dims: head dims of q and k, and of v.
        like: of the dtype and on the device of q, k and v.
    """
    if any(dim % VECTOR_ELEMENTS for dim in dims):
        return  # torch moves such rows
    wide, row = torch.float32, torch.zeros(1, dtype=torch.int64, device=like.device)

    def rows(heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return like.new_zeros((1, 1, heads, dim), dtype=dtype)

    same, ends = dims[0] == dims[1], ((row, None), (None, row), (row, row))
    many = [(q_heads, dims[0], 1), (kv_heads, dims[0], 1 + same)]
    many += [] if same else [(q_heads, dims[1], 1), (kv_heads, dims[1], 1)]
    asked = [(q_heads, dims[0], MOST_MOVED)] if same else [(q_heads, dims[1], 2)]
    for heads, dim, count in many + asked:
        for source, target in product((like.dtype, wide), repeat=2):
            parts = [rows(heads, dim, source) for _ in range(count)]
            totals = [rows(heads, dim, target) for _ in range(count)]
            for from_rows, to_rows in ends:
                move(parts, totals, from_rows, to_rows, add=False)
            move(parts, totals, None, row, add=True)
    for out, part, places in product((like.dtype, wide), (like.dtype, wide), (None, row)):
        lse = like.new_zeros((1, q_heads, 1), dtype=wide)
        outs = [rows(q_heads, dims[1], dtype) for dtype in (out, part)]
        merge(outs[0], lse, outs[1], lse.clone(), places)


def fits(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors of rows, [b, l, h, d]: a dense, aligned d of a dtype
    that adds up in fp32, no matter the other strides."""
    for t in tensors:
        b, l, h, dense = t.stride()
        # Of numbers that are all multiples of a power of two, the bitwise or is one too.
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
    *,
    add: bool,
) -> None:
    """Copy rows of each source over rows of its target, or add them; see :func:`.copy_rows`. At
    most MOST_MOVED tensors, that all fit and have the same b, h and d, and one or both of the
    indices."""
    both = [t for pair in zip(sources, targets, strict=True) for t in pair]
    absent = 2 * MOST_MOVED - len(both)
    numbers = [stride for t in both for stride in _vectors(t)] + [0, 0, 0] * absent
    rows = to_rows if from_rows is None else from_rows
    assert rows is not None
    b, _, heads, dim = targets[0].shape
    tensors = (*both, *[None] * absent, from_rows, to_rows)
    _launch(kernels.move, (b, len(rows), heads, dim), tensors, numbers, (add,))


def _vectors(t: Tensor) -> tuple[int, int, int]:
    """Strides of b, l and h in vectors."""
    b, l, h, _ = t.stride()
    return b // VECTOR_ELEMENTS, l // VECTOR_ELEMENTS, h // VECTOR_ELEMENTS


def _launch(
    kernel: Any,
    shape: Sequence[int],
    tensors: Sequence[Tensor | None],
    strides: Sequence[int],
    constants: tuple[Any, ...] = (),
) -> None:
    """Launch a kernel, on the current stream of the first tensor's device, over a ``shape`` of b,
    rows, heads and d. The rest are the kernel's arguments, but for sizes and those of a tile."""
    b, length, heads, dim = shape
    if 0 in shape:
        return
    assert tensors[0] is not None
    device = tensors[0].device  # what is written may be memory of a peer
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, shape, tensors, strides, constants)
        return
    dtypes = [None if t is None else t.dtype for t in tensors]
    tile_rows, head_tiles, constants = _tiled(heads, dim, constants)
    grid = (-(-length // tile_rows) * head_tiles, b, 1)
    key = (id(kernel), device, *constants, *dtypes)
    variant = _variants.get(key)
    if variant is None:
        variant = kernel[grid](*tensors, length, heads, *strides, *constants)
        if variant is not None:  # where kernels are interpreted
            _variants[key] = variant
    else:
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        variant[grid](*addresses, length, heads, *strides, *constants)


@cache
def _tiled(heads: int, dim: int, constants: tuple[Any, ...]) -> _Tile:
    block = _power_of_two(dim)
    tile_pairs = max(TILE_ELEMENTS // block, 1)
    tile_heads = min(_power_of_two(heads), max(tile_pairs // LSE_ROWS, 1))
    tile_rows = tile_pairs // tile_heads
    constants = (*constants, dim, block, tile_rows, tile_heads)
    return _Tile(tile_rows, -(-heads // tile_heads), constants)


def _power_of_two(n: int) -> int:
    """The next one that is at least ``n``."""
    return 1 << (n - 1).bit_length()
