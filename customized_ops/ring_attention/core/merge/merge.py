"""Merging partial attention results.

Attention over keys A and B is exact from its parts (Milakov & Gimelshein, arXiv:1805.02867, 2018):

    lse = log(exp(lse_A) + exp(lse_B))
    out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

Everything is computed in the accumulation dtype: fp32, or fp64 for fp64 inputs. Where a row gets
more than two parts, results between them are kept in that dtype too, because rounding them would
add an error for each part. Where a row gets at most two, the one result is rounded to the inputs'
dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tape import allocate, copied, launch
from .rows import on_gpu


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None = None
) -> None:
    """Merge a partial result into ``(out, lse)``, in place: one kernel on a GPU with Triton.

    A row that neither side attends keeps out 0 and lse -inf.

    Args:
        out: [b, l, h, d], any strides and dtype; rounded once. lse: [b, h, l], natural log, in the
            accumulation dtype.
        part_out: [b, n, h, d], any strides and dtype. part_lse: [b, h, n].
        rows: int64[n], on the tensors' device, no row twice: row i of the part belongs to row
            rows[i]. None: n is l, and row i belongs to row i.
    """
    kernels = on_gpu(out, part_out)
    if kernels is not None and lse.dtype == part_lse.dtype == torch.float32:
        kernels.merge(out, lse, part_out, part_lse, rows)
    elif rows is None:
        launch(_merge_torch, out, lse, part_out, part_lse)
    else:
        launch(_merge_rows_torch, out, lse, part_out, part_lse, rows)


def _merge_torch(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """The definition of merging, on any device and in any dtype."""
    top = torch.maximum(lse, part_lse)
    top = top.masked_fill(top == -torch.inf, 0.0)  # -inf - -inf would be NaN
    weight, part_weight = torch.exp(lse - top), torch.exp(part_lse - top)
    total = weight + part_weight
    norm = total.clamp_min(torch.finfo(total.dtype).tiny)
    out.copy_(out * _per_row(weight / norm) + part_out * _per_row(part_weight / norm))
    lse.copy_(top + torch.log(total))


def _merge_rows_torch(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor
) -> None:
    some_out, some_lse = out.index_select(1, rows), lse.index_select(2, rows)
    _merge_torch(some_out, some_lse, part_out, part_lse)
    out.index_copy_(1, rows, some_out)
    lse.index_copy_(2, rows, some_lse)


def _per_row(x: Tensor) -> Tensor:
    """[b, h, l] -> [b, l, h, 1]."""
    return x.transpose(1, 2).unsqueeze(-1)


RowPiece = tuple[int, int, bool]  # first row, one past the last, whether the rows had a part before


class RowCoverage:
    """A set of rows that grows by ranges. A step has only a few of them, so plain lists will do."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # disjoint, apart and sorted

    def add(self, start: int, stop: int) -> list[RowPiece]:
        """Take in rows start .. stop - 1; returns their pieces, in order."""
        if start == stop:
            return []
        if not self._ranges:
            self._ranges = [(start, stop)]
            return [(start, stop, False)]
        if len(self._ranges) == 1 and self._ranges[0][0] <= start and stop <= self._ranges[0][1]:
            return [(start, stop, True)]
        before = [r for r in self._ranges if r[1] < start]
        after = [r for r in self._ranges if r[0] > stop]
        met = self._ranges[len(before) : len(self._ranges) - len(after)]
        pieces, at = [], start
        for first, last in met:
            first, last = max(first, start), min(last, stop)
            if at < first:
                pieces.append((at, first, False))
            if first < last:
                pieces.append((first, last, True))
            at = last
        if at < stop:
            pieces.append((at, stop, False))
        bounds = [*met, (start, stop)]
        joined = min(first for first, _ in bounds), max(last for _, last in bounds)
        self._ranges = [*before, joined, *after]
        return pieces

    def rest(self, length: int) -> list[RowPiece]:
        """Take in rows 0 .. length - 1 where they are missing; returns their pieces, in order."""
        if self._ranges == [(0, length)]:
            return []
        return [piece for piece in self.add(0, length) if not piece[2]]


class Accumulator:
    """The running result of one block of rows over stages. A first part that has all rows is kept
    as it is; only a second one costs a merge.

    Args:
        length: of the block; needed where the first part may have only some of the rows.
        parts: the most parts that any row gets. With at most two, parts are merged in their own
            dtype, which rounds once; with more, or None for unknown, in the accumulation dtype.
    """

    def __init__(self, length: int | None = None, parts: int | None = None) -> None:
        self._length = length
        self._wide = parts is None or parts > 2
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._covered = RowCoverage()

    def add(self, out: Tensor, lse: Tensor, rows: slice | None = None) -> None:
        """Merge in out [b, n, h, d] and lse [b, h, n] over further keys, and take ownership of
        both. ``rows``, with start and stop, says which n rows of the block these are; None: all."""
        first, count = (0 if rows is None else rows.start), out.shape[1]
        wide = accumulation_dtype(out.dtype)
        if self._out is None or self._lse is None:
            length = count if rows is None else self._length
            assert length is not None, "some rows come first, of a block of unknown length"
            if count == length:
                self._covered.add(0, length)
                self._out, self._lse = out, lse
                return
            b, _, h, d = out.shape
            dtype = wide if self._wide else out.dtype
            self._out = allocate(out.new_empty, (b, length, h, d), dtype=dtype)
            self._lse = allocate(lse.new_empty, (b, h, length))
        for start, stop, covered in self._covered.add(first, first + count):
            # Writing into another dtype would round, and a second part may follow.
            if self._wide if covered else self._out.dtype != out.dtype:
                self._out = copied(Tensor.to, self._out, wide)
            here = span_of(self._out, 1, start, stop), span_of(self._lse, 2, start, stop)
            first_part, last_part = start - first, stop - first
            part = span_of(out, 1, first_part, last_part), span_of(lse, 2, first_part, last_part)
            if covered:
                merge_(*here, *part)
            else:
                launch(Tensor.copy_, here[0], part[0])
                launch(Tensor.copy_, here[1], part[1])

    @property
    def empty(self) -> bool:
        """Whether no part was added."""
        return self._out is None

    def so_far(self) -> tuple[Tensor, Tensor]:
        """out, in its present dtype, and lse; a part must have been added before."""
        assert self._out is not None and self._lse is not None, "a part"
        for start, stop, _ in self._covered.rest(self._out.shape[1]):
            launch(Tensor.zero_, self._out[:, start:stop])
            launch(Tensor.fill_, self._lse[..., start:stop], -torch.inf)
        return self._out, self._lse

    def result(self, rows: Tensor, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out in ``dtype``, lse). ``rows``: the block of q, [b, l, h, d]."""
        if self.empty:
            return unattended(rows, v_dim, dtype)
        out, lse = self.so_far()
        return as_dtype(out, dtype), lse


def span_of(t: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Some rows of a tensor, as a view; the tensor itself if these are all."""
    return t if stop - start == t.shape[dim] else t.narrow(dim, start, stop - start)


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, without the microsecond that it takes where there is nothing to do."""
    return t if t.dtype == dtype else copied(Tensor.to, t, dtype)


def unattended(rows: Tensor, v_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result of rows that attend nothing: out 0, lse -inf. ``rows``: [b, l, h, d]."""
    b, length, h, _ = rows.shape
    wide = accumulation_dtype(rows.dtype)
    lse = allocate(rows.new_full, (b, h, length), -torch.inf, dtype=wide)
    return allocate(rows.new_zeros, (b, length, h, v_dim), dtype=dtype), lse


class Sum:
    """The running gradient of one tensor, ``like``, [b, l, h, d], over stages and ranks. A first
    part that has all rows is kept as it is; from the second on the sum is in the accumulation
    dtype.

    Args:
        parts: the most parts that any row gets. With at most two, the second is added in the first
            one's dtype, which rounds once; None for unknown.
    """

    def __init__(self, like: Tensor, parts: int | None = None) -> None:
        self._like = like
        self._wide = parts is None or parts > 2
        self._total: Tensor | None = None
        self._covered = RowCoverage()

    def add(self, part: Tensor, rows: slice | None = None) -> None:
        """Add a part [b, n, h, d] of any dtype, and take ownership of it. ``rows``, with start and
        stop, says which n rows it has; None: all."""
        first, count = (0 if rows is None else rows.start), part.shape[1]
        pieces = self._covered.add(first, first + count)
        if self._total is None:
            if count == self._like.shape[1]:
                self._total = part
                return
            dtype = accumulation_dtype(self._like.dtype) if self._wide else part.dtype
            self._total = allocate(torch.empty_like, self._like, dtype=dtype)
        for start, stop, covered in pieces:
            # Writing into another dtype would round, and a second part may follow.
            if not self._may_round(self._total) if covered else self._total.dtype != part.dtype:
                self._total = as_dtype(self._total, accumulation_dtype(self._like.dtype))
            here = span_of(self._total, 1, start, stop)
            piece = span_of(part, 1, start - first, stop - first)
            launch(Tensor.add_ if covered else Tensor.copy_, here, piece)

    def _may_round(self, total: Tensor) -> bool:
        """Whether a part may be added to ``total`` in the dtype that it has."""
        return not self._wide and total.dtype == self._like.dtype

    @property
    def empty(self) -> bool:
        """Whether no part was added."""
        return self._total is None

    def wide(self) -> Tensor:
        """The sum so far in the accumulation dtype, to be added to in place."""
        dtype = accumulation_dtype(self._like.dtype)
        if self._total is None:
            self._covered.add(0, self._like.shape[1])
            self._total = allocate(torch.zeros_like, self._like, dtype=dtype)
        self._total = as_dtype(self.so_far(), dtype)
        return self._total

    def place(self) -> Tensor:
        """The sum so far, to be added to in place. It is in the accumulation dtype, unless no row
        gets more than two parts. Then at most one part may be added to a row, which rounds."""
        if self._total is not None and self._may_round(self._total):
            return self.so_far()
        return self.wide()

    def so_far(self) -> Tensor:
        """The sum so far in its present dtype; if it is a single part, in that of the part."""
        if self._total is None:
            return allocate(torch.zeros_like, self._like)
        for start, stop, _ in self._covered.rest(self._like.shape[1]):
            launch(Tensor.zero_, self._total[:, start:stop])
        return self._total

    def result(self) -> Tensor:
        """The sum in the dtype of ``like``."""
        return as_dtype(self.so_far(), self._like.dtype)
