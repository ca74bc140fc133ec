"""Triton kernels over rows of [b, l, h, d], each the same as plain torch in one pass over memory.

A program works on a tile of (row, head) pairs and all their ``d`` elements. Strides of tensors of
rows are given in units of VECTOR elements, which tells the compiler that 16 bytes may be loaded at
once; whoever launches has made sure of it (:func:`.launch.fits`). Nothing but dtypes and constants
makes a new variant: no length, stride or pointer of lse or of indices does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

VECTOR = tl.constexpr(8)  # elements; 16 bytes of a 2-byte dtype
TINY = tl.constexpr(1.1754943508222875e-38)  # of fp32

NUMBERS = ["length", "heads"]
OUT = ["out_b", "out_l", "out_h"]
PART = ["part_b", "part_l", "part_h"]
LSES = ["lse_b", "lse_h", "lse_l", "part_lse_b", "part_lse_h", "part_lse_l"]
MOVES = [f"{end}{n}_{dim}" for n in range(3) for end in ("from", "to") for dim in "blh"]


# Arguments of one tensor to a line.
# fmt: off


@triton.jit
def pairs(length: tl.tensor, heads: tl.tensor, ROWS: tl.constexpr, HEADS: tl.constexpr) -> Any:
    """The rows and heads of this program's pairs, and which pairs exist; heads vary fastest."""
    head_tiles = tl.cdiv(heads, HEADS)
    tile = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, ROWS * HEADS)
    row = tile // head_tiles * ROWS + n // HEADS
    head = tile % head_tiles * HEADS + n % HEADS
    return row, head, (row < length) & (head < heads)


@triton.jit
def offsets(
    row: tl.tensor, head: tl.tensor,
    stride_b: tl.tensor, stride_l: tl.tensor, stride_h: tl.tensor,
    BLOCK: tl.constexpr,
) -> Any:
    """Offsets of the pairs' elements in a tensor of rows."""
    batch = tl.program_id(1).to(tl.int64)
    vectors = batch * stride_b + row * stride_l + head * stride_h
    return (vectors * VECTOR)[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def moved(
    source: tl.tensor, target: tl.tensor,
    from_b: tl.tensor, from_l: tl.tensor, from_h: tl.tensor,
    to_b: tl.tensor, to_l: tl.tensor, to_h: tl.tensor,
    from_row: tl.tensor, to_row: tl.tensor, head: tl.tensor, here: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Copy one tensor's part of the tile."""
    mask = here[:, None] & (tl.arange(0, BLOCK) < DIM)[None, :]
    value = tl.load(source + offsets(from_row, head, from_b, from_l, from_h, BLOCK), mask)
    target_at = target + offsets(to_row, head, to_b, to_l, to_h, BLOCK)
    tl.store(target_at, value.to(target.dtype.element_ty), mask)


@triton.jit
def added(
    source: tl.tensor, target: tl.tensor,
    from_b: tl.tensor, from_l: tl.tensor, from_h: tl.tensor,
    to_b: tl.tensor, to_l: tl.tensor, to_h: tl.tensor,
    order: tl.tensor, first: tl.tensor, count: tl.tensor, most: tl.tensor,
    to_row: tl.tensor, head: tl.tensor, here: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Add the rows of one tensor's part of the tile in fp32, one after the other."""
    mask = here[:, None] & (tl.arange(0, BLOCK) < DIM)[None, :]
    target_at = target + offsets(to_row, head, to_b, to_l, to_h, BLOCK)
    total = tl.load(target_at, mask, other=0.0).to(tl.float32)
    if order is None:
        part = source + offsets(first, head, from_b, from_l, from_h, BLOCK)
        total += tl.load(part, mask, other=0.0).to(tl.float32)
    else:
        n = 0
        while n < most:
            there = here & (n < count)
            row = tl.load(order + first + n, there, other=0)
            part = source + offsets(row, head, from_b, from_l, from_h, BLOCK)
            total += tl.load(part, mask & there[:, None], other=0.0).to(tl.float32)
            n += 1
    tl.store(target_at, total.to(target.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize=[*NUMBERS, *OUT, *PART, *LSES],
    do_not_specialize_on_alignment=["lse", "part_lse", "rows"],
)
def merge(
    out: tl.tensor, part: tl.tensor, lse: tl.tensor, part_lse: tl.tensor, rows: tl.tensor,
    length: tl.int64, heads: tl.int64,
    out_b: tl.int64, out_l: tl.int64, out_h: tl.int64,
    part_b: tl.int64, part_l: tl.int64, part_h: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, lse_l: tl.int64,
    part_lse_b: tl.int64, part_lse_h: tl.int64, part_lse_l: tl.int64,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
) -> None:
    """Merge part row i into row i, or rows[i], as :func:`..merge._merge_torch` does in fp32."""
    row, head, here = pairs(length, heads, ROWS, HEADS)
    home = row
    if rows is not None:
        home = tl.load(rows + row, here, other=0)
    batch = tl.program_id(1).to(tl.int64)
    lse_at = lse + batch * lse_b + head * lse_h + home * lse_l
    part_lse_at = part_lse + batch * part_lse_b + head * part_lse_h + row * part_lse_l
    mask = here[:, None] & (tl.arange(0, BLOCK) < DIM)[None, :]
    out_at = out + offsets(home, head, out_b, out_l, out_h, BLOCK)
    part_at = part + offsets(row, head, part_b, part_l, part_h, BLOCK)
    # All loads before any arithmetic, so that they are under way together.
    mine, theirs = tl.load(out_at, mask), tl.load(part_at, mask)
    my_lse = tl.load(lse_at, here, other=0.0)
    their_lse = tl.load(part_lse_at, here, other=0.0)
    top = tl.maximum(my_lse, their_lse)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    weight, part_weight = tl.exp(my_lse - top), tl.exp(their_lse - top)
    total = weight + part_weight
    norm = tl.maximum(total, TINY)
    merged = mine.to(tl.float32) * (weight / norm)[:, None]
    merged += theirs.to(tl.float32) * (part_weight / norm)[:, None]
    tl.store(out_at, merged.to(mine.dtype), mask)
    tl.debug_barrier()  # several threads read one lse; none may find it merged already
    tl.store(lse_at, top + tl.log(total), here)


@triton.jit(
    do_not_specialize=[*NUMBERS, *MOVES],
    do_not_specialize_on_alignment=["from_rows", "to_rows"],
)
def move(
    source0: tl.tensor, target0: tl.tensor,
    source1: tl.tensor, target1: tl.tensor,
    source2: tl.tensor, target2: tl.tensor,
    from_rows: tl.tensor, to_rows: tl.tensor,
    length: tl.int64, heads: tl.int64,
    from0_b: tl.int64, from0_l: tl.int64, from0_h: tl.int64,
    to0_b: tl.int64, to0_l: tl.int64, to0_h: tl.int64,
    from1_b: tl.int64, from1_l: tl.int64, from1_h: tl.int64,
    to1_b: tl.int64, to1_l: tl.int64, to1_h: tl.int64,
    from2_b: tl.int64, from2_l: tl.int64, from2_h: tl.int64,
    to2_b: tl.int64, to2_l: tl.int64, to2_h: tl.int64,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
) -> None:
    """Copy row i, or from_rows[i], to row i, or to_rows[i], of one to three tensors."""
    row, head, here = pairs(length, heads, ROWS, HEADS)
    from_row, to_row = row, row
    if from_rows is not None:
        from_row = tl.load(from_rows + row, here, other=0)
    if to_rows is not None:
        to_row = tl.load(to_rows + row, here, other=0)
    moved(
        source0, target0, from0_b, from0_l, from0_h, to0_b, to0_l, to0_h,
        from_row, to_row, head, here, DIM, BLOCK,
    )
    if source1 is not None:
        moved(
            source1, target1, from1_b, from1_l, from1_h, to1_b, to1_l, to1_h,
            from_row, to_row, head, here, DIM, BLOCK,
        )
    if source2 is not None:
        moved(
            source2, target2, from2_b, from2_l, from2_h, to2_b, to2_l, to2_h,
            from_row, to_row, head, here, DIM, BLOCK,
        )


@triton.jit(
    do_not_specialize=[*NUMBERS, "most", *MOVES],
    do_not_specialize_on_alignment=["tokens", "starts", "order"],
)
def add(
    source0: tl.tensor, target0: tl.tensor,
    source1: tl.tensor, target1: tl.tensor,
    source2: tl.tensor, target2: tl.tensor,
    tokens: tl.tensor, starts: tl.tensor, order: tl.tensor,
    length: tl.int64, heads: tl.int64, most: tl.int64,
    from0_b: tl.int64, from0_l: tl.int64, from0_h: tl.int64,
    to0_b: tl.int64, to0_l: tl.int64, to0_h: tl.int64,
    from1_b: tl.int64, from1_l: tl.int64, from1_h: tl.int64,
    to1_b: tl.int64, to1_l: tl.int64, to1_h: tl.int64,
    from2_b: tl.int64, from2_l: tl.int64, from2_h: tl.int64,
    to2_b: tl.int64, to2_l: tl.int64, to2_h: tl.int64,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
) -> None:
    """Add row i to row tokens[i] of one to three tensors, or up to ``most`` rows, from
    order[starts[i]] to order[starts[i + 1] - 1]."""
    token, head, here = pairs(length, heads, ROWS, HEADS)
    to_row = tl.load(tokens + token, here, other=0)
    first, count = token, token
    if order is not None:
        first = tl.load(starts + token, here, other=0)
        count = tl.load(starts + token + 1, here, other=0) - first
    added(
        source0, target0, from0_b, from0_l, from0_h, to0_b, to0_l, to0_h,
        order, first, count, most, to_row, head, here, DIM, BLOCK,
    )
    if source1 is not None:
        added(
            source1, target1, from1_b, from1_l, from1_h, to1_b, to1_l, to1_h,
            order, first, count, most, to_row, head, here, DIM, BLOCK,
        )
    if source2 is not None:
        added(
            source2, target2, from2_b, from2_l, from2_h, to2_b, to2_l, to2_h,
            order, first, count, most, to_row, head, here, DIM, BLOCK,
        )
