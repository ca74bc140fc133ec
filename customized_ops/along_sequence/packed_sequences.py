"""Packed sequences as flash-linear-attention's kernels read them: their cumulative lengths, and the
chunk that each block of a kernel takes.

All tables go to the device in one copy, once for all layers of a batch. Left to itself, the library
computes the chunk tables in every call, and the host waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..ring_attention.core.arrays import Ints, columns
from ..ring_attention.core.index_table import IndexTable, send

CHUNK = 64  # tokens in a chunk, for the library's kernels that take chunk tables


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """
    Attributes:
        ends: int64[n + 1], cumulative lengths.
        chunks: int64[m, 2]: each chunk's sequence, and its index within that sequence.
        chunk_ends: int64[n + 1], cumulative numbers of chunks.
    """

    ends: IndexTable
    chunks: IndexTable
    chunk_ends: IndexTable

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tables on a device, as arguments of the library."""
        send([self.ends, self.chunks, self.chunk_ends], device)
        return {"cu_seqlens": self.ends.on(device), "chunk_indices": self.chunks.on(device)}


def packed_sequences(ends: Ints, b: int) -> PackedSequences | None:
    """The tables for segments with cumulative lengths ``ends`` in each of b batch entries, with
    the entries laid end to end; None where each entry is one segment."""
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
