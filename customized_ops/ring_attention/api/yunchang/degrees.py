"""Ulysses within a ring (USP): which ranks share out heads, and which rank holds which tokens.

    2 x 2, zigzag, tokens 0..7      ring rank 0: 0 1 6 7       ring rank 1: 2 3 4 5
                                    rank 0: 0 1  rank 1: 6 7   rank 2: 2 3  rank 3: 4 5

A ring rank's tokens are on its Ulysses ranks in order. Ulysses ranks are neighbours; without
``use_ulysses_low`` the ranks of one ring are: of these four, 0 and 1, and 2 and 3.

Fang, Zhao: USP, arXiv:2405.07719 (2024); the layouts are those of yunchang 0.6.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from annotations.after_import import constant_when_compiled

from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.layout import Layout
from ...op.arguments import ArgumentError, is_integer, require

RINGS: dict[str, Callable[[int, int], Layout]] = {
    "basic": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "strip": Layout.striped,
}
# The same tokens, other kernels.
RINGS |= dict.fromkeys(("basic_pytorch", "basic_flashinfer", "basic_npu"), Layout.contiguous)


@dataclass(frozen=True)
class SequenceParallel:
    """Ranks that cut one sequence.

    Attributes:
        ulysses_degree: ranks that share out the heads of the same tokens.
        ring_degree: number of such teams, which share out the tokens.
        process_group: the ``ulysses_degree * ring_degree`` ranks: a ProcessGroup, its global ranks
            in increasing order, a rank of ``run_ranks``, or None for one rank.
        use_ulysses_low: neighbours are Ulysses ranks; False: neighbours are ranks of a ring.

    Raises:
        ArgumentError: degrees are not 1 or more, or their product is not the group's size.
        GroupError: this rank is not in the group.
    """

    ulysses_degree: int
    ring_degree: int
    process_group: GroupLike = None
    use_ulysses_low: bool = True

    def __post_init__(self) -> None:
        for name in ("ulysses_degree", "ring_degree"):
            check_degree("SequenceParallel", name, getattr(self, name))
        if self.size != self.comm.size:
            raise ArgumentError(
                f"SequenceParallel: ulysses_degree={self.ulysses_degree} times ring_degree="
                f"{self.ring_degree} is {self.size} ranks, but the group has {self.comm.size}"
            )

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.ulysses_degree * self.ring_degree

    @property
    def comm(self) -> Comm:
        """The group as this rank sees it."""
        return group_comm(self.process_group)

    @property
    def team_size(self) -> int | None:
        """For attention: how many ranks share out heads if they are neighbours; None: the plan
        decides."""
        apart = not self.use_ulysses_low and min(self.ulysses_degree, self.ring_degree) > 1
        return None if apart else self.ulysses_degree

    def layout(self, ring_impl_type: str, total: int) -> Layout:
        """The layout of ``total`` tokens; see :func:`layout_of`."""
        degrees = self.ulysses_degree, self.ring_degree
        return layout_of(ring_impl_type, total, *degrees, self.use_ulysses_low)


def check_degree(title: str, name: str, degree: object) -> None:
    """Raise ArgumentError for anything but an integer of 1 or more."""
    require(is_integer(degree, 1), title, name, "a number of ranks, 1 or more", degree)


@constant_when_compiled  # its arguments are, and numpy is not to be traced
def layout_of(
    ring_impl_type: str, total: int, ulysses_degree: int, ring_degree: int, use_ulysses_low: bool
) -> Layout:
    """The layout of a sequence: that of ``ring_impl_type`` over the ring ranks, each part of which
    is cut in order over its Ulysses ranks.

    ``use_ulysses_low`` matters only for zigzag: the other types number ring ranks by rank,
    whichever ranks are neighbours. Lengths need not divide; then the last parts are shorter.

    Args:
        ring_impl_type: one of RINGS.
    """
    return _made(ring_impl_type, total, ulysses_degree, ring_degree, use_ulysses_low)


@lru_cache(maxsize=64)  # a layout may take megabytes
def _made(
    ring_impl_type: str, total: int, ulysses_degree: int, ring_degree: int, use_ulysses_low: bool
) -> Layout:
    make, ranks = RINGS[ring_impl_type], ulysses_degree * ring_degree
    if make is Layout.contiguous or ulysses_degree == 1:
        return make(total, ranks)
    held = [make(total, ring_degree).positions(rank) for rank in range(ring_degree)]
    parts = [np.array_split(own, ulysses_degree) for own in held]
    mine = []
    for rank in range(ranks):
        if use_ulysses_low or ring_impl_type != "zigzag":
            ring, ulysses = divmod(rank, ulysses_degree)
        else:
            ulysses, ring = divmod(rank, ring_degree)
        mine.append(np.stack([parts[ring][ulysses], parts[ring][ulysses] + 1], axis=1))
    layout = Layout.from_ranges(mine)  # type: ignore[arg-type]
    contiguous = Layout.contiguous(total, ranks)
    return contiguous if layout == contiguous else layout  # its spec is short


_default: list[SequenceParallel] = []  # of the last set_seq_parallel_pg, none or one


def set_default(parallel: SequenceParallel) -> None:
    """Make ``parallel`` the default of modules without one, and of zigzag extracts."""
    _default[:] = [parallel]


def default_parallel(title: str) -> SequenceParallel:
    """The value of the last :func:`set_default`; ArgumentError if there is none."""
    if not _default:
        raise ArgumentError(
            f"{title}: say first how the sequence is cut, by set_seq_parallel_pg or as parallel="
        )
    return _default[0]


def basic_extract_local(
    value: Tensor,
    rank: int,
    world_size: int,
    rd: int | None = None,
    ud: int | None = None,
    dim: int = 1,
) -> Tensor:
    """This rank's tokens of ``value``, laid out contiguously, whatever the degrees; no gradients.

    The other arguments are those of :func:`zigzag_extract_local`.
    """
    degrees = (world_size, 1) if rd is None and ud is None else (rd, ud)
    return _extract("basic", value.detach(), rank, world_size, *degrees, dim, True)


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1
) -> Tensor:
    """This rank's tokens of ``value``, ring ranks in stripes; as :func:`zigzag_extract_local`."""
    return _extract("strip", value, rank, world_size, rd, ud, dim, True)


def zigzag_extract_local(
    value: Tensor,
    rank: int,
    world_size: int,
    rd: int,
    ud: int,
    dim: int = 1,
    *,
    use_ulysses_low: bool | None = None,
) -> Tensor:
    """This rank's tokens of ``value``, whose dim ``dim`` is the sequence; a copy.

    Args:
        rank: among the ranks that cut the sequence, or among all ranks, where each group of
            neighbours cuts its own copy. world_size: how many ranks cut it, ``rd * ud``.
        rd, ud: ring and Ulysses degree.
        use_ulysses_low: None takes it from the last ``set_seq_parallel_pg`` if that had these
            degrees; otherwise it means True.
    Raises:
        ArgumentError: the degrees do not fit the ranks.
    """
    if use_ulysses_low is None:
        same = [each for each in _default if (each.ring_degree, each.ulysses_degree) == (rd, ud)]
        use_ulysses_low = same[0].use_ulysses_low if same else True
    return _extract("zigzag", value, rank, world_size, rd, ud, dim, use_ulysses_low)


def _extract(
    ring_impl_type: str,
    value: Tensor,
    rank: int,
    world_size: int,
    rd: int | None,
    ud: int | None,
    dim: int,
    low: bool,
) -> Tensor:
    title = f"EXTRACT_FUNC_DICT[{ring_impl_type!r}]"
    for name, degree in (("world_size", world_size), ("rd", rd), ("ud", ud)):
        check_degree(title, name, degree)
    assert rd is not None and ud is not None
    if rd * ud != world_size or not is_integer(rank):
        raise ArgumentError(
            f"{title}: ring degree rd={rd} times Ulysses degree ud={ud} must be the {world_size} "
            f"ranks that cut the sequence, and rank one of them, got rank {rank!r}"
        )
    layout = layout_of(ring_impl_type, value.shape[dim], ud, rd, low)
    own = layout.shard(value, rank % world_size, dim)
    return own.clone(memory_format=torch.contiguous_format)


EXTRACT_FUNC_DICT: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(RINGS, basic_extract_local),
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
}
