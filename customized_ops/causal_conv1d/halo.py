"""The tokens that a rank lacks: the width - 1 before each of its runs, in the same document.

    width 4, contiguous over 3 ranks     a a a a a|b b b|b b b b
    rank 1 lacks nothing: its first token begins document b
    rank 2 lacks the 3 tokens of rank 1; if rank 1 had fewer, also tokens of earlier ranks

A rank's own tokens and the ones it lacks are put in one buffer: run after run in the order of the
sequence, each run preceded by its halo. A token's position counts from the first token of its
document that the buffer holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from ..along_sequence import Segments
from ..ring_attention.core.arrays import Ints, columns
from ..ring_attention.core.index_table import IndexTable
from ..ring_attention.core.plan.exchanges.between_layouts import wanted_exchange
from ..ring_attention.core.plan.exchanges.exchange import Exchange


@dataclass(frozen=True, eq=False)
class Halo:
    """One rank's buffer.

    Attributes:
        sources: int64[n], of each token of the buffer its index among the rank's own, in the order
            of its layout, and the fetched ones after them; None where these are the same.
        kept: int64[l]: where the rank's own tokens are in the buffer, in the layout's order; None
            where nothing is to be done.
        positions: int64[n].
        ends: int64[runs + 1]: cumulative lengths of the runs with their halos.
    """

    sources: IndexTable | None
    kept: IndexTable | None
    positions: IndexTable
    ends: Ints

    @cached_property
    def run(self) -> IndexTable:
        """int32[n]: the number of each token's run."""
        lengths = np.diff(self.ends)
        return IndexTable(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))

    def buffer(self, x: Tensor, fetched: Tensor) -> Tensor:
        """From [b, l, d] of the rank's own tokens, and of the fetched ones."""
        if self.sources is None:
            return x
        both = torch.cat([x, fetched], 1)
        return both.index_select(1, self.sources.on(x.device))

    def own(self, y: Tensor) -> Tensor:
        """The rank's own tokens of a buffer."""
        return y if self.kept is None else y.index_select(1, self.kept.on(y.device))


def wanted_tokens(segments: Segments, width: int) -> Ints:
    """int64[n, 4]: rank, start, stop, offset of the tokens that ranks lack, as
    :func:`wanted_exchange` takes them."""
    chained = segments.chained[~segments.first[segments.chained]]
    begin = segments.ends[segments.document[chained]]
    stop, rank = segments.start[chained], segments.rank[chained]
    start = np.maximum(begin, stop - (width - 1))
    kept = start < stop
    rank, start, stop = rank[kept], start[kept], stop[kept]
    order = np.lexsort((start, rank))
    rank, start, stop = rank[order], start[order], stop[order]
    before = np.cumsum(stop - start) - (stop - start)
    offset = before - before[np.searchsorted(rank, rank)] if len(rank) else before
    return columns(rank, start, stop, offset)


def received_tokens(segments: Segments, width: int) -> Ints:
    """int64[P]: how many tokens each rank receives from others."""
    wanted, ranks = wanted_tokens(segments, width), segments.layout.group_size
    sides = [wanted_exchange(wanted, segments.layout, rank).recv for rank in range(ranks)]
    return np.array([side[side[:, 0] != n, 2].sum() for n, side in enumerate(sides)])


@lru_cache(maxsize=256)
def exchange_of(segments: Segments, width: int, rank: int) -> Exchange:
    """What a rank fetches for a convolution of this width."""
    return wanted_exchange(wanted_tokens(segments, width), segments.layout, rank)


@lru_cache(maxsize=64)  # each has tables of a rank's tokens on the device
def halo_of(segments: Segments, width: int, rank: int) -> Halo:
    """The buffer of a rank for a convolution of this width."""
    layout, local = segments.layout, segments.local(rank)
    wanted = wanted_tokens(segments, width)
    fetched = {
        stop: (offset, stop - start) for r, start, stop, offset in wanted.tolist() if r == rank
    }
    own = np.arange(layout.sizes[rank]) if local.order is None else local.order.values
    sources, positions = [], []
    for n, begin in enumerate(segments.start[local.number].tolist()):
        offset, count = fetched.get(begin, (0, 0))
        halo = len(own) + offset + np.arange(count)
        tokens = np.concatenate([halo, own[local.ends[n] : local.ends[n + 1]]])
        sources.append(tokens)
        positions.append(np.arange(len(tokens)))
    nothing = np.zeros(0, np.int64)
    index = np.concatenate([nothing, *sources])
    kept = np.argsort(index, kind="stable")[: len(own)]
    same = len(index) == len(own) and bool((index == np.arange(len(own))).all())
    return Halo(
        sources=None if same else IndexTable(index),
        kept=None if same else IndexTable(kept),
        positions=IndexTable(np.concatenate([nothing, *positions])),
        ends=np.cumsum([0, *map(len, positions)]).astype(np.int64),
    )
