"""FlexAttention's BlockMask as an AttnMask, pair for pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils.weak import WeakIdKeyDictionary

from ...core.arrays import Bools, Ints
from ...core.mask import AttnMask, MaskError
from ...core.mask.row_runs import runs_of, slices_of_runs

MOST_PAIRS = 1 << 28  # takes seconds on a CPU

_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mask_of_block_mask(block_mask: BlockMask, most_pairs: int = MOST_PAIRS) -> AttnMask:
    """The pairs that attend under ``flex_attention``: all pairs of full blocks, and the pairs of
    partial blocks that ``mask_mod`` allows, evaluated for each pair; then joined to few slices.

    A BlockMask is converted once, and the result is cached for as long as the BlockMask lives.
    Whatever its ``mask_mod`` reads must not change, as FlexAttention also requires.

    Args:
        block_mask: its batch entries and heads must all be the same. With one of each, as
            ``create_block_mask(B=None, H=None)`` makes it, ``mask_mod`` is evaluated for entry 0
            and head 0 and assumed not to depend on them.
        most_pairs: the most pairs for which ``mask_mod`` is evaluated.
    Raises:
        MaskError: the mask differs by batch entry or head, or is too large.
    """
    known = _known.get(block_mask)
    if known is None:
        known = _known[block_mask] = _converted(block_mask, most_pairs)
    return known


def _converted(block_mask: BlockMask, most_pairs: int) -> AttnMask:
    batch, heads, *_ = block_mask.kv_num_blocks.shape
    q_block, k_block = block_mask.BLOCK_SIZE
    asked = int(block_mask.kv_num_blocks.sum()) * q_block * k_block
    if asked > most_pairs:
        raise MaskError(
            f"mask_of_block_mask: mask_mod decides {asked} pairs (blocks of {q_block} x {k_block}, "
            f"{batch} batch entries, {heads} heads), at most {most_pairs} are asked for; make the "
            "mask with a constructor of AttnMask, or raise most_pairs"
        )
    masks = (_of(block_mask, b, h) for b in range(batch) for h in range(heads))
    first = next(masks)
    for n, other in enumerate(masks, start=1):
        if other != first:
            raise MaskError(
                f"mask_of_block_mask: batch entry {n // heads}, head {n % heads} attends other "
                "pairs than the first; one mask serves all of them here, so call attention for "
                "each"
            )
    return first


def _of(block_mask: BlockMask, b: int, h: int) -> AttnMask:
    q_len, k_len = block_mask.seq_lengths
    q_block, k_block = block_mask.BLOCK_SIZE
    partial = _keys(block_mask.kv_num_blocks[b, h], block_mask.kv_indices[b, h], k_block, k_len)
    full = [np.zeros(0, dtype=np.int64)] * len(partial)
    if block_mask.full_kv_num_blocks is not None:
        counts, columns = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        assert columns is not None
        full = _keys(counts[b, h], columns[b, h], k_block, k_len)
    runs = [np.zeros((0, 3), dtype=np.int64)]
    for n, (asked, whole) in enumerate(zip(partial, full, strict=True)):
        first, last = n * q_block, min((n + 1) * q_block, q_len)
        row = np.zeros((max(last - first, 0), k_len), dtype=bool)
        row[:, whole] = True
        if len(asked) and len(row):
            row[:, asked] = _asked(block_mask, b, h, np.arange(first, last), asked)
        runs.append(runs_of(row, first))
    return AttnMask(slices_of_runs(np.concatenate(runs)), q_len, k_len)


def _keys(counts: Tensor, columns: Tensor, block: int, length: int) -> list[Ints]:
    """The keys of each row of blocks; those of the last block end at ``length``."""
    found = []
    for count, blocks in zip(counts.tolist(), columns.cpu().numpy(), strict=True):
        keys = (blocks[:count, None].astype(np.int64) * block + np.arange(block)).reshape(-1)
        found.append(keys[keys < length])
    return found


def _asked(block_mask: BlockMask, b: int, h: int, rows: Ints, keys: Ints) -> Bools:
    """The values of ``mask_mod``, bool[rows, keys]."""
    device = block_mask.kv_num_blocks.device
    at, seen = torch.from_numpy(rows).to(device), torch.from_numpy(keys).to(device)

    def elsewhere(entry: Any, head: Any, i: Any, j: Any) -> Any:
        return block_mask.mask_mod(entry + b, head + h, at[i], seen[j])

    mask = create_mask(elsewhere, 1, 1, len(rows), len(keys), device=str(device))
    return mask[0, 0].cpu().numpy()
