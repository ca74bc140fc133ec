"""The masks that the benchmark of kernels measures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from benchmark.documents import document_bounds

from customized_ops.ring_attention import AttnMask
from speed.table import Row

BLOCK = 512  # of block-causal
SMALL = 128  # of random blocks
WIDE = 1 << 30  # no bound


@dataclass(frozen=True)
class Mask:
    """A mask of the table, with its class of speed and its description for libraries."""

    name: str
    shape_class: str
    mask: AttnMask
    window: int = -1
    bounds: tuple[int, ...] = ()
    raw: bool = True

    @property
    def tokens(self) -> int:
        """The number of its rows, and of its keys."""
        return self.mask.q_len

    def row(self, kernel: str, *notes: str) -> Row:
        """The kernel's line for this mask, with nothing measured yet."""
        pairs = self.mask.area
        return Row(self.name, self.tokens, kernel, self.shape_class, pairs, notes=list(notes))


def masks(n: int, seed: int) -> list[Mask]:
    """The masks of the table for ``n`` tokens."""
    bounds = document_bounds(n, seed, most=WIDE)
    count = len(bounds) - 1
    of_documents = f"{count} document{'s'[: count > 1]}"
    packed = AttnMask.varlen(bounds, causal=True)
    windows = [
        Mask(f"window {w}", "window", AttnMask.dense(n, window=(w, 0)), window=w)
        for w in (1024, 4096)
        if w < n
    ]
    return [
        Mask("causal", "causal", AttnMask.causal(n)),
        Mask(f"packed, {of_documents}", "packed", packed, bounds=bounds),
        *windows,
        Mask(f"prefix-LM, {of_documents}", "sparse", prefix_documents(bounds), raw=False),
        *([Mask(f"random blocks {SMALL}", "sparse", blocks(n, seed), raw=False)] * (n > 2 * BLOCK)),
        Mask(f"block-causal {BLOCK}", "sparse", AttnMask.block_causal(n, BLOCK), raw=False),
    ]


def prefix_documents(bounds: tuple[int, ...]) -> AttnMask:
    """Causal documents, whose first third attends to itself in both directions."""
    slices = []
    for start, stop in pairwise(bounds):
        third = start + (stop - start) // 3
        slices += [(start, third, start, third, -WIDE, WIDE)] if third > start else []
        slices.append((third, stop, start, stop, -WIDE, 0))
    return AttnMask.from_slices(slices, bounds[-1], bounds[-1])


def blocks(n: int, seed: int) -> AttnMask:
    """A quarter of the blocks before the diagonal, and those on it."""
    count = -(-n // SMALL)
    chosen = np.tril(np.random.default_rng(seed).random((count, count)) < 1 / 4)
    np.fill_diagonal(chosen, True)
    return AttnMask.from_block_mask(chosen, SMALL, n, n)
