"""MagiAttention's configuration classes, as far as they say something to this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ...core.layout import Layout
from ...core.mask import AttnMask

Deal = Callable[[AttnMask, int, int | None], Layout]


def _sequential(mask: AttnMask, ranks: int, chunk: int | None) -> Layout:
    """Chunks in the order of the sequence, as many a rank, the first ranks one more."""
    if chunk is None:
        return Layout.contiguous(mask.q_len, ranks)
    chunks = -(-mask.q_len // chunk)
    each = chunks // ranks + (np.arange(ranks) < chunks % ranks)
    return Layout.from_chunks(mask.q_len, ranks, chunk, np.repeat(np.arange(ranks), each))


@dataclass(frozen=True)
class DispatchAlg:
    """How tokens are dealt to ranks; made by its two subclasses."""

    @property
    def deal(self) -> Deal:
        """From a mask, a number of ranks and tokens in a chunk to a layout."""
        raise NotImplementedError(
            "dispatch_config.alg must be MinHeapDispatchAlg() (balanced work) or "
            "SequentialDispatchAlg() (tokens in order)"
        )


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Ranks with the same work: :meth:`Layout.balanced`, which deals better than a heap."""

    @property
    def deal(self) -> Deal:
        """See :class:`DispatchAlg`."""
        return Layout.balanced


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """Tokens in order."""

    @property
    def deal(self) -> Deal:
        """See :class:`DispatchAlg`."""
        return _sequential


@dataclass(frozen=True)
class DispatchConfig:
    """How tokens are dealt.

    Attributes:
        chunk_size: tokens that stay together; None lets the layout choose, and keeps documents
            whole where it can.
        uneven_shard: ranks may differ in their numbers of tokens: they may here in any case, so
            this only forbids a pad_size.
        alg: :class:`MinHeapDispatchAlg` or :class:`SequentialDispatchAlg`.
    """

    chunk_size: int | None = None
    uneven_shard: bool = False
    alg: DispatchAlg = field(default_factory=MinHeapDispatchAlg)


@dataclass(frozen=True)
class OverlapConfig:
    """How computing and moving overlap: here a plan chooses it by its costs.

    Attributes:
        degree: None or 1, their default; another number of stages is refused.
    Raises:
        NotImplementedError: another number of stages.
    """

    degree: int | None = 1

    def __post_init__(self) -> None:
        if self.degree not in (None, 1):
            raise NotImplementedError(
                f"OverlapConfig: degree={self.degree} is not taken: a plan's costs choose in how "
                "many steps keys arrive; leave it None (make_plan(stages=) shows what others cost)"
            )


@dataclass(frozen=True)
class DistAttnConfig:
    """Both of them."""

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)


@lru_cache(maxsize=64)
def dealt(mask: AttnMask, ranks: int, config: DispatchConfig) -> Layout:
    """The layout of a mask's tokens, made once.

    Raises:
        LayoutError: the chunk size is not a positive integer.
    """
    return config.alg.deal(mask, ranks, config.chunk_size)
