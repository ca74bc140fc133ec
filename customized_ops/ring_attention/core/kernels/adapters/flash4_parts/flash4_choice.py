"""Predicts whether flash-attn-4 is faster with window calls or with one block-sparse call."""

from __future__ import annotations

import importlib.util
from functools import cache, partial

import torch

from ...protocol.kernel import BackwardOperands, ForwardOperands, HostKey, Pairs
from ...window.block_lists import blocks_touched
from ...window.library_calls import lowered
from . import flash4_blocks

# Measured in bf16 with head dim 128, windows on an H200, blocks on an H100; only ratios decide
# anything. A block that is attended in part asks the mask for each of its pairs.
WINDOW_FLOPS, BLOCK_FLOPS = (650e12, 590e12), (675e12, 580e12)  # per second: forward, backward
PARTIAL_BLOCKS = 2.2, 2.8  # the cost of a partial block, in whole ones
CALL_SECONDS = 80e-6  # of host time, hidden behind longer kernels
NEXT_SECONDS = 80e-6  # for each call after the first: a GPU is not full at the end of a kernel
MEMORY_BYTES = 3e12  # per second, read or written
# Bytes per number of q and out, and of k and v, which a backward's kernels before and after the one
# that attends read and write. They sum up out times its gradient, and turn fp32 sums into halves.
BACKWARD_ROW_BYTES, BACKWARD_KEY_BYTES = 8, 10
# The library compiles separate kernels for calls that fit a block, of 64 to 256 rows or keys, and
# changing lengths would meet them one by one. So no call declares itself so short: fewer rows or
# keys than this are packed, because packed sequences may be shorter than the max_seqlen given.
LEAST = 512
COMPILE_SECONDS = 3.0  # to compile such a kernel for block lists, which cannot be packed
COMMON_DIM = 128  # head dim; smaller ones have the same blocks

Operands = ForwardOperands | BackwardOperands
Range = tuple[int, int]


def prepare(pairs: Pairs) -> None:
    """Make the block lists of the most common head dims, and what is needed to compare them with
    window calls, if the library that takes them is installed."""
    if len(calls := lowered(pairs)) > 1 and _is_installed():
        for call in calls:
            _ = call.tiles
        _touched(pairs, COMMON_DIM)
        flash4_blocks.lists(pairs, COMMON_DIM)


@cache  # it would search all package folders for each batch
def _is_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def blocks_if_faster(
    given: Operands, pairs: Pairs, *, backward: bool
) -> flash4_blocks.Lists | None:
    """Block lists where one block-sparse call is predicted to be faster than window calls."""
    if len(lowered(pairs)) < 2:
        return None
    q, k, v = given.q, given.k, given.v

    def make() -> flash4_blocks.Lists | None:
        if torch.cuda.get_device_capability(q.device)[0] != 9:
            return None
        short = q.shape[0] == 1 and min(pairs.q_len, pairs.k_len) < LEAST
        windows, blocks = seconds(given, pairs, backward=backward)
        if windows < blocks + (COMPILE_SECONDS if short else 0.0):
            return None
        return flash4_blocks.lists(pairs, q.shape[-1])

    key = (blocks_if_faster, backward, q.shape, k.shape[2], v.shape, q.device)
    return pairs.made(key, make)


def seconds(given: Operands, pairs: Pairs, *, backward: bool) -> tuple[float, float]:
    """Predicted times of window calls, and of one block-sparse call."""
    q, v, calls = given.q, given.v, lowered(pairs)
    flops = 2.0 * 128 * 128 * q.shape[0] * q.shape[2] * (q.shape[-1] + v.shape[-1])
    flops *= 2.5 if backward else 1  # of matrix products: 5 instead of 2
    extra = partial(_extra_bytes, given, backward=backward)
    windows = 0.0
    for call in calls:
        moved = extra(call.rows, call.keys) / MEMORY_BYTES
        windows += max(CALL_SECONDS, call.tiles * flops / WINDOW_FLOPS[backward] + moved)
    # Rows and keys that a call shares with earlier calls are read, added to and written.
    rows, keys = ([getattr(call, side) for call in calls] for side in ("rows", "keys"))
    merged = _merged_bytes(given, _common(rows), _common(keys), backward=backward)
    part, whole = _touched(pairs, q.shape[-1])
    blocks = (whole + PARTIAL_BLOCKS[backward] * part) * flops / BLOCK_FLOPS[backward]
    blocks += extra((0, pairs.q_len), (0, pairs.k_len)) / MEMORY_BYTES
    windows += (len(calls) - 1) * NEXT_SECONDS + merged / MEMORY_BYTES
    return windows, max(CALL_SECONDS, blocks)


def _touched(pairs: Pairs, head_dim: int) -> tuple[float, float]:
    """Blocks of 128 rows and keys that block lists would attend in part, and whole."""
    block_k = flash4_blocks.block_k(head_dim)

    def make() -> tuple[float, float]:
        lengths = pairs.q_len, pairs.k_len
        part, whole = blocks_touched(pairs.slices, *lengths, flash4_blocks.BLOCK_Q, block_k)
        return part * block_k / 128, whole * block_k / 128

    return pairs.made(HostKey("blocks touched", (block_k,)), make)


def _common(ranges: list[Range]) -> int:
    """By how many tokens the lengths of the ranges, added up, exceed their union."""
    total = sum(stop - start for start, stop in ranges)
    end, union = 0, 0
    for start, stop in sorted(ranges):
        union += max(0, stop - max(start, end))
        end = max(end, stop)
    return total - union


def _extra_bytes(given: Operands, rows: Range, keys: Range, *, backward: bool) -> int:
    """Bytes of these rows and keys that a backward reads and writes besides attending them."""
    if not backward:
        return 0
    q, k, v = given.q, given.k, given.v
    of_rows = (rows[1] - rows[0]) * q.shape[2] * (q.shape[-1] + v.shape[-1])
    of_keys = (keys[1] - keys[0]) * k.shape[2] * (k.shape[-1] + v.shape[-1])
    return q.shape[0] * (BACKWARD_ROW_BYTES * of_rows + BACKWARD_KEY_BYTES * of_keys)


def _merged_bytes(given: Operands, rows: int, keys: int, *, backward: bool) -> int:
    """Bytes read and written to add the results of so many rows and keys to others: for each number
    one half is read, and one fp32 value is read and written."""
    q, k, v = given.q, given.k, given.v
    numbers = rows * q.shape[2] * (q.shape[-1] if backward else v.shape[-1])
    if backward:
        numbers += keys * k.shape[2] * (k.shape[-1] + v.shape[-1])
    return q.shape[0] * numbers * (2 + 4 + 4)
