"""Packed sequences as flash-linear-attention's kernels read them: their cumulative lengths, and the
chunk that each block of a kernel takes.

All goes to the device in one copy, once for all layers of a batch. The library by itself makes what
is about chunks for each call, and the host waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..ring_attention.core.arrays import Ints, columns
from ..ring_attention.core.index_table import IndexTable, send

CHUNK = 64  # tokens, of its kernels that are given chunks


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """
    Attributes:
        ends: int64[n + 1], cumulative lengths.
        chunks: int64[m, 2]: of each chunk its sequence, and its number there.
        chunk_ends: int64[n + 1], cumulative numbers of chunks.
    """

    ends: IndexTable
    chunks: IndexTable
    chunk_ends: IndexTable

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """As arguments of the library."""
        send([self.ends, self.chunks, self.chunk_ends], device)
        return {"cu_seqlens": self.ends.on(device), "chunk_indices": self.chunks.on(device)}


def packed_sequences(ends: Ints, b: int) -> PackedSequences | None:
    """Of segments with these cumulative lengths in each of b entries of a batch, one entry after
    the other; None where each entry is one segment."""
    return _packed(ends.tobytes(), b) if len(ends) > 2 else None


@lru_cache(maxsize=64)
def _packed(ends: bytes, b: int) -> PackedSequences:
    of_entry = np.frombuffer(ends, np.int64)
    starts = (of_entry[:-1] + of_entry[-1] * np.arange(b)[:, None]).reshape(-1)
    all_ends = np.append(starts, b * of_entry[-1])
    count = -(-np.diff(all_ends) // CHUNK)
    chunk_ends = np.concatenate([[0], np.cumsum(count)])
    sequence = np.repeat(np.arange(len(count)), count)
    chunks = columns(sequence, np.arange(len(sequence)) - chunk_ends[sequence])
    return PackedSequences(IndexTable(all_ends), IndexTable(chunks), IndexTable(chunk_ends))
