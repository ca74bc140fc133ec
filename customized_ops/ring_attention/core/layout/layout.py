"""Which rank holds which tokens of a sequence, and in which order.

A layout is the same on every rank and is made from arguments alone, so every rank knows where every
token is without communication.

    contiguous(8, 2)   rank 0: 0 1 2 3    rank 1: 4 5 6 7
    zigzag(8, 2)       rank 0: 0 1 6 7    rank 1: 2 3 4 5
    striped(8, 2)      rank 0: 0 2 4 6    rank 1: 1 3 5 7
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..arrays import Ints, columns
from ..mask import AttnMask
from ..topology import Topology
from . import balance
from . import layout_tables as tables
from .documents import balance_documents
from .layout_arguments import (
    LayoutError,
    cumulative,
    integers,
    lengths,
    read,
    shorten,
    weighted_masks,
    whole,
    write,
)
from .layout_value import IN_USE, LayoutValue


@dataclass(frozen=True, eq=False, repr=False)
class Layout(LayoutValue):
    """Token ranges per rank, in the rank's local order. Made by the static methods below.

    Attributes and errors are those of :class:`.LayoutValue`.
    """

    @staticmethod
    def contiguous(total: int, group_size: int) -> Layout:
        """``total`` tokens in order, split as DTensor's ``Shard`` splits: ceil(total / group_size)
        tokens a rank, so the last ranks may hold fewer, or none.

        Raises:
            LayoutError: ``total`` is negative or ``group_size`` is not positive.
        """
        total, group_size = lengths("contiguous", total, group_size)
        table = tables.in_order(tables.even_bounds(total, group_size))
        return Layout(table, group_size, write("contiguous", total, group_size))

    @staticmethod
    def zigzag(
        total: int, group_size: int, cu_seqlens: Sequence[int] | Ints | None = None
    ) -> Layout:
        """2 * group_size chunks; rank r holds chunk r and its mirror image 2 * group_size - 1 - r.

        Under a causal mask each rank then has the same work, up to the rounding of chunks where
        2 * group_size does not divide ``total``.

        With ``cu_seqlens``, cumulative lengths of packed documents, each document is cut this way
        on its own: chunk i of a document of n tokens starts at its token
        floor(i * n / (2 * group_size)). A rank holds the documents in order, the front chunk of
        each first.

            zigzag(12, 2, [0, 4, 12])   rank 0: 0 3 4 5 10 11    rank 1: 1 2 6 7 8 9

        Raises:
            LayoutError: as :meth:`contiguous`; or ``cu_seqlens`` do not start at 0 and end at
                ``total``, or they fall in between.
        """
        total, group_size = lengths("zigzag", total, group_size)
        fields: list[int | list[int]] = [total, group_size]
        if cu_seqlens is None:
            bounds = tables.even_bounds(total, 2 * group_size)[None]
        else:
            starts = cumulative(cu_seqlens, total)
            fields.append(starts.tolist())
            cuts = np.arange(2 * group_size + 1) * np.diff(starts)[:, None] // (2 * group_size)
            bounds = starts[:-1, None] + cuts
        table = tables.front_and_end(bounds)
        return Layout(table, group_size, write("zigzag", *fields))

    @staticmethod
    def striped(total: int, group_size: int, block: int = 1) -> Layout:
        """Token i on rank (i // block) % group_size: blocks are dealt out like cards.

        Under a causal mask ranks then have nearly the same work, in long packed documents too
        (Striped Attention, Brandon et al., 2023, arXiv:2311.09431).

        Raises:
            LayoutError: as :meth:`contiguous`; or ``block`` is not positive.
        """
        total, group_size = lengths("striped", total, group_size)
        block = whole("Layout.striped: block", block, 1)
        table = tables.of_chunks(total, block, np.arange(-(-total // block)) % group_size)
        return Layout(table, group_size, write("striped", total, group_size, block))

    @staticmethod
    def paired(half: Layout) -> Layout:
        """Two sequences of equal length, end to end: token i of each is on the rank where ``half``
        has token i.

            paired(zigzag(4, 2))   rank 0: 0 3 4 7    rank 1: 1 2 5 6

        For :meth:`.AttnMask.block_diffusion`: if ``half`` keeps blocks whole, a rank holds noisy
        blocks and their clean ones, so only clean keys move. Work is as even as that of the clean
        rows under ``half``, which is even with :meth:`zigzag`, or where a mask of documents is
        balanced.
        """
        rank, start, stop = half.table.T
        table = np.stack([half.table, columns(rank, start + half.total, stop + half.total)])
        by_rank = np.argsort(np.concatenate([rank, rank]), kind="stable")
        return Layout(table.reshape(-1, 3)[by_rank], half.group_size)

    @staticmethod
    def balanced(
        mask: AttnMask | Sequence[tuple[AttnMask, float]],
        group_size: int,
        chunk: int | None = None,
        *,
        topology: Topology | None = None,
    ) -> Layout:
        """Tokens assigned to ranks so that each rank's tokens attend the same number of pairs.

        Ranks still hold equal numbers of tokens: as many as :meth:`contiguous` would give them, or
        the same number of chunks, up to one. Attention's work follows the pairs, but the rest of
        the model (its linear layers, its memory) follows the tokens.

        Packed documents are assigned by construction, in milliseconds
        (:mod:`.balance_documents`). They stay whole where that is possible; else the largest are
        split, each over as few ranks as possible, so that few keys cross ranks. The largest rank's
        work is then within 2% of the mean, or 5% where documents are few and long, or ranks have so
        little to do that one document is cut in two and all others stay whole. If all stay whole,
        work may also differ by what one more kernel call would take. A rank holds its parts
        of split documents first, then its whole documents, both in the order of the sequence.

        Prefix trees (:meth:`.AttnMask.prefix_tree`) are documents, too. Where one has to be split,
        its subtrees, and paths with them, stay together as far as work can then be within 5%, on
        hosts first (:mod:`.subtrees`).

        Over several hosts, other documents are assigned to hosts first, so that few keys cross
        between them (:mod:`.host_documents`), then to the ranks of each. So are chunks, if all
        hosts have the same number of ranks. Where the result is not within 5% (3% for chunks),
        hosts are ignored.

        Other masks stay contiguous if that is as even, or are assigned in chunks by a search
        (:func:`.balance.assign`), so that few keys cross ranks. Work is within 1% of the mean, or
        the least possible, where such an assignment is found. Where chunks are taken that are
        neither within 1% (3% over several hosts) nor proven to be the best, a warning gives the
        figures.

        Args:
            mask: of self-attention; or pairs (mask, weight) for models whose layers differ, such as
                ``[(full, 8), (window, 24)]``: then the weighted sum of the work is balanced.
            chunk: tokens per chunk, the last may be shorter; documents are then cut at chunks too.
                None assigns documents where that is even, else chunks of about
                total / (16 * group_size), a multiple of 128 where that is 128 or more.
            topology: hosts of the ranks, as in ``CostModel.topology``; None: one host.
        Raises:
            LayoutError: a mask with q_len != k_len, masks of different lengths, or none; a weight
                that is not positive; ``group_size`` or ``chunk`` is not positive; ``topology`` is
                not a Topology, or has another number of ranks.
        """
        group_size = whole("Layout.balanced: group_size", group_size, 1)
        if topology is not None and not isinstance(topology, Topology):
            raise LayoutError(
                "Layout.balanced: topology must be a Topology or None, such as group_costs(group)"
                f".topology or CostModel.over('4x8').topology, got {topology!r}"
            )
        if topology is not None and topology.size != group_size:
            raise LayoutError(
                f"Layout.balanced: topology {topology} has {topology.size} ranks, group_size is "
                f"{group_size}"
            )
        weighted = weighted_masks(mask)
        total = weighted[0][0].q_len
        slices = [(each.slices, weight) for each, weight in weighted]
        documents = None
        if chunk is None:
            documents = balance_documents.assign_documents(slices, total, group_size, topology)
            if documents is None:
                return Layout.contiguous(total, group_size)
            if documents.good:
                layout = Layout(documents.table, group_size)
                if len(layout.table) > group_size:
                    return layout
                contiguous = Layout.contiguous(total, group_size)
                return contiguous if layout == contiguous else layout
            chunk = max(1, total // (16 * group_size))
            chunk -= chunk % 128 if chunk >= 128 else 0
        chunk = whole("Layout.balanced: chunk", chunk, 1)
        even = topology is not None and len(set(topology.hosts)) == 1
        hosts = len(topology.hosts) if topology is not None and even else 1
        rank_of, certificate = balance.assign_masks(slices, total, chunk, group_size, hosts)
        if documents is not None and documents.imbalance <= certificate.imbalance:
            return Layout(documents.table, group_size)
        tolerance = balance.HOSTS_TOLERANCE if hosts > 1 else 0.0
        if not certificate.good and certificate.imbalance > 1 + tolerance:
            warnings.warn(certificate.warning(chunk), stacklevel=_level_of_caller())
        return Layout.from_chunks(total, group_size, chunk, rank_of)

    @staticmethod
    def from_chunks(
        total: int, group_size: int, chunk: int, rank_of: Sequence[int] | Ints
    ) -> Layout:
        """Chunks of ``chunk`` tokens (the last may be shorter), number n on rank ``rank_of[n]``.

        A rank holds its chunks in the order of the sequence.

        Raises:
            LayoutError: as :meth:`contiguous`; or ``chunk`` is not positive, or ``rank_of`` does
                not name a rank for each chunk.
        """
        total, group_size = lengths("from_chunks", total, group_size)
        chunk = whole("Layout.from_chunks: chunk", chunk, 1)
        ranks, chunks = integers(rank_of), -(-total // chunk)
        if ranks is None or ranks.shape != (chunks,) or ((ranks < 0) | (ranks >= group_size)).any():
            raise LayoutError(
                f"Layout.from_chunks: rank_of must be {chunks} ranks below {group_size}, "
                f"got {shorten(str(rank_of))}"
            )
        spec = write("chunks", total, group_size, chunk, ranks.tolist())
        return Layout(tables.of_chunks(total, chunk, ranks), group_size, spec)

    @staticmethod
    def from_sizes(sizes: Sequence[int]) -> Layout:
        """Tokens in order, ``sizes[r]`` of them on rank r; a size may be 0.

        Raises:
            LayoutError: no sizes, or a negative one.
        """
        each = integers(sizes)
        if each is None or each.ndim != 1 or len(each) == 0 or (each < 0).any():
            raise LayoutError(
                f"Layout.from_sizes: sizes must be 0 or more, one a rank, got {shorten(str(sizes))}"
            )
        table = tables.in_order(np.concatenate([[0], np.cumsum(each)]))
        return Layout(table, len(each), write("sizes", each.tolist()))

    @staticmethod
    def from_ranges(ranges: Sequence[Sequence[tuple[int, int]]]) -> Layout:
        """Any layout: for each rank its global token ranges ``(start, stop)`` in local order.

        Raises:
            LayoutError: no ranks, or ranges that do not cover 0..total-1, each token once.
        """
        if len(ranges) == 0:
            raise LayoutError("Layout.from_ranges: ranges must be one sequence a rank, got none")
        parts = []
        for rank, own in enumerate(ranges):
            pairs = integers(own, width=2) if len(own) else np.zeros((0, 2), dtype=np.int64)
            if pairs is None or pairs.shape != (len(own), 2):
                raise LayoutError(
                    f"Layout.from_ranges: ranges[{rank}] must be (start, stop) pairs of ints, "
                    f"got {shorten(str(own))}"
                )
            parts.append(np.insert(pairs, 0, rank, axis=1))
        return Layout(np.concatenate(parts), len(ranges))

    @staticmethod
    def parse(spec: str) -> Layout:
        """The layout whose :attr:`spec` this is; the same object each time.

        Raises:
            LayoutError: ``spec`` is not a valid spec.
        """
        return IN_USE.get(spec) or _read(spec)


@lru_cache(maxsize=64)  # a layout may take megabytes
def _read(spec: str) -> Layout:
    maker, arguments = read(spec)
    return getattr(Layout, maker)(*arguments)


def _level_of_caller() -> int:
    """The stack level, for a warning, of the code that called this package, past whatever lies
    between, such as what keeps its functions from being compiled."""
    package, compiler = str(Path(__file__).parents[2]), str(Path("torch", "_dynamo"))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(package) and compiler not in name:
            break
        level, frame = level + 1, frame.f_back
    return level
