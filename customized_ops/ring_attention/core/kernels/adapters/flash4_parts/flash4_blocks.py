"""flash-attn-4's block-sparse path: any pairs in one call, as long as rows have few intervals of
keys in blocks that are attended in part.

The library walks a list of key blocks for each block of rows (in the backward, a list of row blocks
for each block of keys). It asks a function of ours about each pair of the blocks that are attended
in part. That function reads the row's intervals of keys from a table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from ....index_table import IndexTable, send
from ....mask.slices import UNBOUNDED, normalise
from ....tape import call_library
from ...protocol.kernel import BackwardOperands, ForwardOperands, Grads, HostKey, OutLse, Pairs
from ...protocol.scoring import Scoring
from ...window.block_lists import BlockList, BlocksMet, block_lists, intervals_in_part
from .flash4_library import interface

BLOCK_Q = 128
# A function is compiled for each of these counts; rows with fewer intervals get empty ones.
INTERVALS = (1, 2, 4, 8)
# The most block pairs that a grid may have: bounds each list to 256 MiB.
MOST_BLOCKS = 1 << 26


@dataclass(frozen=True, eq=False)
class Lists:
    """What the library is given for some pairs."""

    of_rows: dict[str, IndexTable]  # for the library's BlockSparseTensorsTorch, in the forward
    of_keys: dict[str, IndexTable]  # and in the backward
    block_size: tuple[int, int]  # rows and keys
    # int32[rows rounded up to whole blocks * intervals * 2]: start and stop of each interval
    bounds: IndexTable
    intervals: int  # of a row, one of INTERVALS

    @property
    def tables(self) -> list[IndexTable]:
        """All tables of the lists."""
        return [*self.of_rows.values(), *self.of_keys.values(), self.bounds]


def block_k(head_dim: int) -> int:
    """Keys of a block: the library's backward on Hopper wants exactly this many, and its forward
    takes them. The same blocks both ways make one list the other's transpose."""
    return 128 if head_dim <= 128 else 96 if head_dim <= 192 else 64


def lists(pairs: Pairs, head_dim: int) -> Lists | None:
    """The lists of ``pairs``, or None if there are too many blocks, or if a row has too many
    intervals in blocks that are attended in part."""

    def make() -> Lists | None:
        size = BLOCK_Q, block_k(head_dim)
        grid = -(-pairs.q_len // size[0]) * -(-pairs.k_len // size[1])
        if grid > MOST_BLOCKS:
            return None
        sides = block_lists(pairs.slices, pairs.q_len, pairs.k_len, *size)
        found = _bounds(pairs, sides[0], size)
        if found is None:
            return None
        bounds, intervals = found
        of_rows, of_keys = (_tables(side) for side in sides)
        return Lists(of_rows, of_keys, size, IndexTable(bounds), intervals)

    return pairs.made(_key(head_dim), make)


def known_tables(pairs: Pairs, head_dim: int) -> list[IndexTable]:
    """The tables of the lists of ``pairs``, if the lists have been made."""
    known: Lists | None = pairs.known(_key(head_dim))
    return [] if known is None else known.tables


def _key(head_dim: int) -> HostKey:
    return HostKey("block lists", (block_k(head_dim),))


def forward(given: ForwardOperands, made: Lists, scoring: Scoring) -> OutLse:
    """out and lse, as :meth:`~.protocol.Kernel.forward`."""
    q, k, v = given
    out, lse, *_ = call_library(
        interface()._flash_attn_fwd,
        q=q,
        k=k,
        v=v,
        return_lse=True,
        **_options(made, scoring, made.of_rows, q.device),
    )
    return out, lse


def backward(given: BackwardOperands, made: Lists, scoring: Scoring) -> Grads:
    """dq, dk, dv, as :meth:`~.protocol.Kernel.backward`; not deterministic."""
    dq, dk, dv = call_library(
        interface()._flash_attn_bwd,
        **given._asdict(),
        **_options(made, scoring, made.of_keys, given.q.device),
    )
    return dq, dk, dv


def warm_up(given: BackwardOperands, scoring: Scoring) -> Iterator[None]:
    """Compile what documents can need: rows that attend one range of keys, or two."""
    rows, keys = given.q.shape[1], given.k.shape[1]
    inputs = ForwardOperands(given.q, given.k, given.v)
    for ranges in ([(0, keys)], [(0, BLOCK_Q), (keys - BLOCK_Q, keys)]):
        slices = [(0, rows, start, stop, -UNBOUNDED, UNBOUNDED) for start, stop in ranges]
        made = lists(Pairs(normalise(np.array(slices)), rows, keys), given.q.shape[-1])
        assert made is not None
        forward(inputs, made, scoring)
        yield
        backward(given, made, scoring)
        yield


def _options(
    made: Lists, scoring: Scoring, blocks: dict[str, IndexTable], device: torch.device
) -> dict[str, Any]:
    send(made.tables, device)
    on_device = {name: table.on(device) for name, table in blocks.items()}
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
    return {
        "softmax_scale": scoring.softmax_scale,
        "softcap": scoring.softcap,
        "mask_mod": attended(made.intervals),
        "aux_tensors": [made.bounds.on(device)],
        "block_sparse_tensors": sparsity.BlockSparseTensorsTorch(
            **on_device, block_size=made.block_size
        ),
    }


@cache
def attended(intervals: int) -> Callable[..., Any]:
    """The library's ``mask_mod``: whether a key is in one of its row's intervals. One object for
    each number of intervals, as the library compiles a kernel for each."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    @cute.jit
    def in_intervals(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        bounds = aux_tensors[0]
        at = q_idx[0] * (2 * intervals)
        start = utils.scalar_to_ssa(bounds[at], cutlass.Int32)
        stop = utils.scalar_to_ssa(bounds[at + 1], cutlass.Int32)
        found = (kv_idx >= start) & (kv_idx < stop)
        for n in cutlass.range_constexpr(1, intervals):
            start = utils.scalar_to_ssa(bounds[at + 2 * n], cutlass.Int32)
            stop = utils.scalar_to_ssa(bounds[at + 2 * n + 1], cutlass.Int32)
            found = found | ((kv_idx >= start) & (kv_idx < stop))
        return found

    return in_intervals


def _bounds(
    pairs: Pairs, of_rows: BlocksMet, size: tuple[int, int]
) -> tuple[np.ndarray, int] | None:
    """The table of intervals, and how many each row has in it, one of INTERVALS."""
    found = intervals_in_part(pairs.slices, pairs.q_len, of_rows, *size, INTERVALS[-1])
    if found is None:
        return None
    needed = found.shape[1]
    intervals = next(n for n in INTERVALS if n >= needed)
    # The kernel also reads entries of rows beyond the last one, up to the end of the last block.
    table = np.zeros((-(-pairs.q_len // BLOCK_Q) * BLOCK_Q, intervals, 2), dtype=np.int32)
    table[: pairs.q_len, :needed] = found
    return table.ravel(), intervals


def _tables(side: BlocksMet) -> dict[str, IndexTable]:
    """Lists by the library's names, with two dims of 1 in front, for all entries and heads."""

    def of(name: str, blocks: BlockList) -> dict[str, IndexTable]:
        arrays = {f"{name}_block_cnt": blocks.counts, f"{name}_block_idx": blocks.indices}
        return {name: IndexTable(array[None, None]) for name, array in arrays.items()}

    return of("mask", side.partial) | of("full", side.full)
