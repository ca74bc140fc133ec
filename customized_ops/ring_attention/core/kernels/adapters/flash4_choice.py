"""Window calls or one block-sparse call: with which flash-attn-4 is predicted to be faster."""

from __future__ import annotations

import importlib.util

import torch

from ..protocol.kernel import BackwardOperands, ForwardOperands, HostKey, Pairs
from ..window.block_lists import blocks_touched
from ..window.library_calls import lowered
from ..window.lowering import WindowCall
from . import flash4_blocks

# Measured on an H200 in bf16 with head dim 128; only their ratios decide anything. The block-sparse
# backward did 350e12 to 560e12, by mask.
WINDOW_FLOPS, BLOCK_FLOPS = (650e12, 590e12), (610e12, 480e12)  # per second: forward, backward
CALL_SECONDS = 80e-6  # of the host, hidden behind longer kernels
COPY_BYTES = 3e12  # per second, read or written
# The library compiles kernels of their own for what fits a block, of 64 to 256 rows or keys, and
# lengths that change would meet them one by one. So calls never say that they are so short: fewer
# rows or keys than this are packed, as packed sequences may be shorter than the longest named.
LEAST = 512
COMPILE_SECONDS = 3.0  # of such a kernel for block lists, which cannot be packed
COMMON_DIM = 128  # of heads; smaller ones have the same blocks


def prepare(pairs: Pairs) -> None:
    """Make the block lists of the commonest head dims, where there is the library to take them."""
    if len(lowered(pairs)) > 1 and importlib.util.find_spec("flash_attn") is not None:
        _touched(pairs, COMMON_DIM)
        flash4_blocks.lists(pairs, COMMON_DIM)


def blocks_if_faster(
    given: ForwardOperands | BackwardOperands, pairs: Pairs, *, backward: bool
) -> flash4_blocks.Lists | None:
    """Block lists where one block-sparse call is predicted to be faster than window calls."""
    if len(lowered(pairs)) < 2:
        return None
    q, k, v = given.q, given.k, given.v

    def make() -> flash4_blocks.Lists | None:
        calls = lowered(pairs)
        if torch.cuda.get_device_capability(q.device)[0] != 9:
            return None
        touched = _touched(pairs, q.shape[-1])
        flops = 2.0 * 128 * 128 * q.shape[0] * q.shape[2] * (q.shape[-1] + v.shape[-1])
        flops *= 2.5 if backward else 1  # of matrix products: 5 instead of 2
        windows = sum(
            max(CALL_SECONDS, call.tiles * flops / WINDOW_FLOPS[backward])
            + _merged_bytes(call, given, backward=backward) / COPY_BYTES
            for call in calls
        )
        short = q.shape[0] == 1 and min(pairs.q_len, pairs.k_len) < LEAST
        compiling = COMPILE_SECONDS if short else 0.0
        if windows < compiling + max(CALL_SECONDS, touched * flops / BLOCK_FLOPS[backward]):
            return None
        return flash4_blocks.lists(pairs, q.shape[-1])

    key = (blocks_if_faster, backward, q.shape, k.shape[2], v.shape, q.device)
    return pairs.made(key, make)


def _touched(pairs: Pairs, head_dim: int) -> float:
    """Blocks of 128 rows and keys that block lists would attend."""
    block_k = flash4_blocks.block_k(head_dim)

    def make() -> float:
        return blocks_touched(pairs.slices, flash4_blocks.BLOCK_Q, block_k) * block_k / 128

    return pairs.made(HostKey("blocks touched", (block_k,)), make)


def _merged_bytes(
    call: WindowCall, given: ForwardOperands | BackwardOperands, *, backward: bool
) -> int:
    """Bytes read and written to add a call's results to those of others: of each number one half
    read and one fp32 read and written."""
    q, k, v = given.q, given.k, given.v
    rows, keys = (stop - start for start, stop in (call.rows, call.keys))
    if backward:
        numbers = rows * q[0, 0].numel() + keys * (k[0, 0].numel() + v[0, 0].numel())
    else:
        numbers = rows * q.shape[2] * v.shape[-1]
    return q.shape[0] * numbers * (2 + 4 + 4)
