"""Masks that have a name in the literature, each as a handful of band slices. New ones go here.

:class:`~.attn_mask.AttnMask` itself has what the public functions make: causal and full masks,
windows, and packed documents.

In all of them ``window`` counts the keys beside a token's own, as flash-attn does, and -1 is no
bound; a count beyond the sequence means all of it. Patterns with ``block`` are made of blocks of
that many tokens, the last of which may be short; all their other numbers then count blocks. That is
how UltraAttn (SC '25, https://github.com/oliverYoung2001/UltraAttn) writes its masks. Negative
numbers (except -1 as window), a ``block`` or ``stride`` of 0 and anything but integers are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Ints, columns
from .intervals import spread
from .mask_arguments import MaskError, count, cumulative, reach
from .mask_value import MaskValue
from .slices import K0, Q0, UNBOUNDED, Slices, as_slices

if TYPE_CHECKING:
    from typing import Self


def rectangle(q0: int, q1: int, k0: int, k1: int, *, causal: bool = False) -> Slices:
    """Queries [q0, q1) with keys [k0, k1), those up to the query's own if ``causal``."""
    return as_slices([(q0, q1, k0, k1, -UNBOUNDED, 0 if causal else UNBOUNDED)])


def local(n: int, left: int, right: int, block: int, *, causal: bool = False) -> Slices:
    """Each block of tokens with the blocks from ``left`` before to ``right`` after it: whole, or
    its pairs up to the diagonal if ``causal``."""
    hi = 0 if causal else UNBOUNDED
    if block == 1:
        return as_slices([(0, n, 0, n, -left, min(right, hi))])
    blocks = -(-n // block)
    at = np.arange(blocks)
    q0, k0 = at * block, np.maximum(at - left, 0) * block
    q1 = np.minimum(q0 + block, n)
    k1 = np.minimum((at + 1 + min(right, blocks)) * block, n)
    wide = np.full_like(at, UNBOUNDED)
    return columns(q0, q1, k0, k1, -wide, np.full_like(at, hi))


def causal_blocks(starts: Ints, stops: Ints) -> Slices:
    """One causal square [start, stop) per entry of two int64[n]."""
    zero = np.zeros_like(starts)
    return columns(starts, stops, starts, stops, zero - UNBOUNDED, zero)


def diagonals(n: int, stride: int, beyond: int, block: int) -> Slices:
    """The diagonals at every multiple of ``stride`` blocks before a block, beyond ``beyond``."""
    blocks = -(-n // block)
    before = stride * np.arange(beyond // stride + 1, -(-blocks // stride), dtype=np.int64)
    if block == 1:
        zero = np.zeros_like(before)
        return columns(zero, zero + n, zero, zero + n, -before, -before)
    times = blocks - before  # blocks on each diagonal
    diagonal, column = spread(np.zeros_like(times), times)
    row = column + before[diagonal]
    wide = np.full_like(row, UNBOUNDED)
    q0, k0 = row * block, column * block
    return columns(q0, np.minimum(q0 + block, n), k0, k0 + block, -wide, wide)


class Patterns(MaskValue):
    """Constructors of named patterns."""

    @classmethod
    def prefix_lm(cls, n: int, prefix: int) -> Self:
        """A prefix that every token sees whole, then causal.

            AttnMask.prefix_lm(5, prefix=2)
            x x . . .
            x x . . .
            x x x . .
            x x x x .
            x x x x x

        Raffel et al., T5, arXiv:1910.10683, section 3.2.

        Args:
            n, prefix: tokens.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        n, prefix = count("n", n), count("prefix", prefix)
        prefix = min(prefix, n)
        rows = [rectangle(0, n, 0, prefix), rectangle(prefix, n, prefix, n, causal=True)]
        return cls._disjoint(np.concatenate(rows), n, n)

    @classmethod
    def block_causal(cls, n: int, block: int) -> Self:
        """Each token sees all of its own block, later tokens included, and all of earlier blocks.

            AttnMask.block_causal(5, block=2)
            x x . . .
            x x . . .
            x x x x .
            x x x x .
            x x x x x

        Block diffusion and frame-wise video models; Arriola et al., arXiv:2503.09573.

        Args:
            n, block: tokens.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        n, block = count("n", n), count("block", block, least=1)
        return cls._disjoint(local(n, n, 0, block), n, n)

    @classmethod
    def block_diffusion(cls, n: int, block: int, cu_seqlens: object = None) -> Self:
        """A noisy copy of a sequence and then the clean one, for training block diffusion. Noisy
        blocks see themselves and the clean blocks before them; clean blocks see themselves and the
        clean blocks before them.

            AttnMask.block_diffusion(4, block=2)
            x x . . . . . .
            x x . . . . . .
            . . x x x x . .
            . . x x x x . .
            . . . . x x . .
            . . . . x x . .
            . . . . x x x x
            . . . . x x x x

        Arriola et al., arXiv:2503.09573. A noisy row has as many pairs as its clean row. There are
        three slices per block, or three per document if ``block`` is 1.

        Args:
            n: tokens of each copy. block: tokens; the last block may be short.
            cu_seqlens: cumulative lengths of packed documents from 0 to ``n``. Documents do not see
                one another, and blocks begin anew in each. None: one document.
        Raises:
            MaskError: a number is out of range, or no integer; or ``cu_seqlens`` are no cumulative
                lengths that end at ``n``.
        """
        n, block = count("n", n), count("block", block, least=1)
        ends = np.array([0, n]) if cu_seqlens is None else cumulative("cu_seqlens", cu_seqlens)
        if ends[-1] != n:
            raise MaskError(f"cu_seqlens must end at n, {n}, got {ends[-1]}")
        size, bands = np.diff(ends), block == 1  # then a document is like one block, in bands
        blocks = np.minimum(size, 1) if bands else -(-size // block)
        document, at = spread(np.zeros_like(size), blocks)
        first, last = ends[document], ends[document + 1]
        start = first + at * block
        stop = last if bands else np.minimum(start + block, last)
        zero = np.zeros_like(start)
        wide = zero + UNBOUNDED
        lo, own, before = (zero, zero, zero + n - 1) if bands else (-wide, wide, wide)
        noisy = columns(start, stop, start, stop, lo, own)
        across = columns(start, stop, first + n, (stop if bands else start) + n, -wide, before)
        clean = columns(start + n, stop + n, first + n, stop + n, -wide, own)
        return cls._disjoint(np.concatenate([noisy, across, clean]), 2 * n, 2 * n)

    @classmethod
    def streaming(cls, n: int, window: int, sink: int, *, block: int = 1) -> Self:
        """Causal sliding window, and the first ``sink`` keys for every later token.

            AttnMask.streaming(6, window=1, sink=2)
            x . . . . .
            x x . . . .
            x x x . . .
            x x x x . .
            x x . x x .
            x x . . x x

        Token i sees keys i - window .. i, which is flash-attn's ``window=(window, 0)``: its own
        and ``window`` more. StreamingLLM, Xiao et al., arXiv:2309.17453. In blocks it is the
        streaming attention that UltraAttn measures: ``streaming(n, 2, 1, block=n // 8)``.

        Args:
            n: tokens.
            window: keys, or blocks, before a token's own; -1 for all, which is plain causal.
            sink: first keys, or blocks.
            block: tokens in a block.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        n, block = count("n", n), count("block", block, least=1)
        kept = min(count("sink", sink) * block, n)
        recent = local(n, reach("window", window), 0, block, causal=True)
        np.maximum(recent[:, K0], kept, out=recent[:, K0])
        sinks = rectangle(0, n, 0, kept, causal=True)
        return cls._disjoint(np.concatenate([sinks, recent]), n, n)

    @classmethod
    def strided(cls, n: int, stride: int, window: int, *, block: int = 1) -> Self:
        """Causal sliding window, and every ``stride``-th key before it.

            AttnMask.strided(7, stride=3, window=1)
            x . . . . . .
            x x . . . . .
            . x x . . . .
            x . x x . . .
            . x . x x . .
            . . x . x x .
            x . . x . x x

        Token i sees the keys i - window .. i and those at a distance that ``stride`` divides: the
        union of the two heads of the Sparse Transformer, Child et al., arXiv:1904.10509,
        there with window = stride. With ``block`` the same holds for blocks, causal inside a
        token's own.

        UltraAttn's "strided" is another mask: groups of 4 blocks, in which a block sees, in both
        directions, the blocks of its group at a distance below 3. That is
        ``from_block_mask((i // 4 == j // 4) & (abs(i - j) < 3), block)`` with i and j from
        ``np.indices((16, 16))``.

        Args:
            n: tokens.
            stride: distance of the far keys, in tokens or blocks.
            window: keys, or blocks, before a token's own; -1 for all, which is plain causal.
            block: tokens in a block. There are n / stride slices for tokens, and up to
                (n / block)² / (2 stride) for blocks.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        n, block = count("n", n), count("block", block, least=1)
        stride, left = count("stride", stride, least=1), reach("window", window)
        recent, far = local(n, left, 0, block, causal=True), diagonals(n, stride, left, block)
        return cls._disjoint(np.concatenate([recent, far]), n, n)

    @classmethod
    def global_local(cls, n: int, window: int, global_tokens: int, *, block: int = 1) -> Self:
        """Symmetric window, and first tokens that see all and are seen by all.

            AttnMask.global_local(6, window=1, global_tokens=1)
            x x x x x x
            x x x . . .
            x x x x . .
            x . x x x .
            x . . x x x
            x . . . x x

        Longformer, Beltagy et al., arXiv:2004.05150, section 3.1. UltraAttn's "global+local" has
        one global block and no other neighbour: ``global_local(n, 0, 1, block=n // 16)``.

        Args:
            n: tokens.
            window: keys, or blocks, on each side of a token's own; -1 for all, which is full.
            global_tokens: first tokens, or blocks.
            block: tokens in a block.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        n, block = count("n", n), count("block", block, least=1)
        first = min(count("global_tokens", global_tokens) * block, n)
        side = reach("window", window)
        near = local(n, side, side, block)
        near[:, [Q0, K0]] = np.maximum(near[:, [Q0, K0]], first)
        seen_and_seeing = [rectangle(0, first, 0, n), rectangle(first, n, 0, first)]
        return cls._disjoint(np.concatenate([*seen_and_seeing, near]), n, n)

    @classmethod
    def star(cls, n: int, block: int, query: int = 0) -> Self:
        """Blocks that see themselves and the first block; last tokens that see everything.

            AttnMask.star(7, block=2, query=1)
            x . . . . . .
            x x . . . . .
            x x x . . . .
            x x x x . . .
            x x . . x . .
            x x . . x x .
            x x x x x x x

        Star Attention, Acharya et al., arXiv:2411.17116: the context is causal inside each block
        and sees the first, the anchor, whole; query tokens are plain causal. UltraAttn's "star" is
        the context alone: ``star(n, n // 4)``.

        Args:
            n: tokens, of which the last are the query.
            block: tokens in a block of the context; its last one may be short.
            query: tokens.
        Raises:
            MaskError: a number is out of range, or no integer.
        """
        n, block = count("n", n), count("block", block, least=1)
        context = n - min(count("query", query), n)
        anchor = rectangle(0, context, 0, min(block, context), causal=True)
        starts = np.arange(block, context, block, dtype=np.int64)
        blocks = causal_blocks(starts, np.minimum(starts + block, context))
        rows = [anchor, blocks, rectangle(context, n, 0, n, causal=True)]
        return cls._disjoint(np.concatenate(rows), n, n)
