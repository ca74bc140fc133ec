"""MagiAttention's configuration classes, with the fields that mean something here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from functools import lru_cache

import numpy as np

from ...core.layout import Layout
from ...core.mask import AttnMask


@dataclass(frozen=True)
class DispatchAlg:
    """How tokens are assigned to ranks; made by its two subclasses."""


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """The same work on all ranks: :meth:`Layout.balanced`, which balances better than a heap."""


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """Tokens in order."""


@dataclass(frozen=True)
class DispatchConfig:
    """How tokens are assigned.

    Attributes:
        chunk_size: tokens that stay together; None lets the layout choose, and keeps documents
            whole where it can.
        uneven_shard: ranks may hold different numbers of tokens. Here they always may, so this
            only forbids a pad_size.
        alg: :class:`MinHeapDispatchAlg` or :class:`SequentialDispatchAlg`.
    """

    chunk_size: int | None = None
    uneven_shard: bool = False
    alg: DispatchAlg = field(default_factory=MinHeapDispatchAlg)


class AttnOverlapMode(Enum):
    """Who chooses the number of steps in which keys arrive: the program, or a solver."""

    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class OverlapAlg:
    """How keys are divided into steps."""


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """The default of MagiAttention, with its fields."""

    random_costs: bool = False
    random_seed: int | None = None


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """MagiAttention's other algorithm."""


@dataclass(frozen=True)
class OverlapConfig:
    """How computation and communication overlap; here a plan chooses this by its costs.

    Every field accepts only MagiAttention's default; ``degree``, the number of steps in which keys
    arrive, also accepts None.

    Raises:
        NotImplementedError: another value; the message names the field.
    """

    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    dynamic_max_degree: int | None = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg = UniformOverlapAlg()
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default and (each.name, value) != ("degree", None):
                raise NotImplementedError(
                    f"OverlapConfig: {each.name}={value!r} is not taken: a plan's costs choose in "
                    f"how many steps keys arrive; leave it {each.default!r} (make_plan(stages=) "
                    "shows what others cost)"
                )


@dataclass(frozen=True)
class DistAttnConfig:
    """How tokens are assigned, and how computation and communication overlap.

    Attributes:
        grpcoll_config: only None.
    Raises:
        NotImplementedError: ``grpcoll_config`` is given.
    """

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)
    grpcoll_config: object = None

    def __post_init__(self) -> None:
        if self.grpcoll_config is not None:
            raise NotImplementedError(
                f"DistAttnConfig: grpcoll_config={self.grpcoll_config!r} tunes the messages of "
                "MagiAttention's own kernels, which are not here; leave it out"
            )


@lru_cache(maxsize=64)
def dispatch_layout(mask: AttnMask, ranks: int, config: DispatchConfig) -> Layout:
    """The layout of a mask's tokens, made once; algorithms that are not here are refused."""
    if isinstance(config.alg, MinHeapDispatchAlg):
        return Layout.balanced(mask, ranks, config.chunk_size)
    if not isinstance(config.alg, SequentialDispatchAlg):
        raise NotImplementedError(
            "dispatch_config.alg must be MinHeapDispatchAlg() (balanced work) or "
            "SequentialDispatchAlg() (tokens in order)"
        )
    if config.chunk_size is None:
        return Layout.contiguous(mask.q_len, ranks)
    # Chunks in the order of the sequence, the same number per rank; the first get the remainder.
    chunks = -(-mask.q_len // config.chunk_size)
    each = chunks // ranks + (np.arange(ranks) < chunks % ranks)
    owners = np.repeat(np.arange(ranks), each)
    return Layout.from_chunks(mask.q_len, ranks, config.chunk_size, owners)
