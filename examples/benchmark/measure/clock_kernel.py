"""Reads a multiprocessor's counters."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stamp(counts: tl.tensor) -> None:
    """Write cycles and nanoseconds to row n of int64[multiprocessors, 2], where n is the
    multiprocessor that it runs on."""
    where = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    nanoseconds = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
    tl.store(counts + 2 * where, cycles)
    tl.store(counts + 2 * where + 1, nanoseconds)
