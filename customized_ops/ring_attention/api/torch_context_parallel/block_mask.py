"""FlexAttention's BlockMask as an AttnMask, pair for pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils.weak import WeakIdKeyDictionary

from ...core.mask import AttnMask, MaskError
from ...core.mask.row_runs import Runs, runs_of, slices_of_runs

MOST_PAIRS = 1 << 28  # seconds on a CPU
Blocks = list[npt.NDArray[np.int64]]  # by row of blocks: which columns

_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mask_of_block_mask(block_mask: BlockMask, most_pairs: int = MOST_PAIRS) -> AttnMask:
    """The pairs that ``flex_attention`` lets attend: those of full blocks, and those of partial
    blocks that ``mask_mod`` says, asked for each pair; then joined to few slices.

    A BlockMask is converted once, and the result is cached for as long as it lives; what its
    ``mask_mod`` reads must stay as it is, as FlexAttention demands too.

    Args:
        block_mask: its batch entries and heads must all be the same. With one of each, as
            ``create_block_mask(B=None, H=None)`` makes it, ``mask_mod`` is asked for entry 0 and
            head 0 and taken not to depend on them.
        most_pairs: the most pairs that ``mask_mod`` is asked for.
    Raises:
        MaskError: it differs by batch entry or head, or is too large.
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
    runs = np.concatenate(list(_runs(block_mask, b, h)))
    return AttnMask(slices_of_runs(runs), *block_mask.seq_lengths)


def _runs(block_mask: BlockMask, b: int, h: int) -> Iterator[Runs]:
    """The runs of each row of blocks."""
    q_len, k_len = block_mask.seq_lengths
    q_block, k_block = block_mask.BLOCK_SIZE
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, b, h)
    full = [np.zeros(0, dtype=np.int64)] * len(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, b, h)
    yield np.zeros((0, 3), dtype=np.int64)
    for n, (some, whole) in enumerate(zip(partial, full, strict=True)):
        first, last = n * q_block, min((n + 1) * q_block, q_len)
        row = np.zeros((max(last - first, 0), k_len), dtype=bool)
        row[:, _tokens(whole, k_block, k_len)] = True
        asked = _tokens(some, k_block, k_len)
        if len(asked) and len(row):
            row[:, asked] = _asked(block_mask, b, h, np.arange(first, last), asked)
        yield runs_of(row, first)


def _listed(counts: Any, indices: Any, b: int, h: int) -> Blocks:
    counts, indices = counts[b, h].cpu().numpy(), indices[b, h].cpu().numpy()
    return [columns[:count] for count, columns in zip(counts, indices, strict=True)]


def _tokens(blocks: npt.NDArray[np.int64], block: int, length: int) -> npt.NDArray[np.int64]:
    """The keys of blocks of keys, of the last no more than there are."""
    keys = (blocks[:, None].astype(np.int64) * block + np.arange(block)).reshape(-1)
    return keys[keys < length]


def _asked(
    block_mask: BlockMask,
    b: int,
    h: int,
    rows: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """What ``mask_mod`` says, bool[rows, keys]."""
    device = block_mask.kv_num_blocks.device
    at, seen = torch.from_numpy(rows).to(device), torch.from_numpy(keys).to(device)

    def elsewhere(entry: Any, head: Any, i: Any, j: Any) -> Any:
        return block_mask.mask_mod(entry + b, head + h, at[i], seen[j])

    said = create_mask(elsewhere, 1, 1, len(rows), len(keys), device=str(device))
    return said[0, 0].cpu().numpy()
