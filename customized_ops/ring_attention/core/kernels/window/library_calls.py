"""The library calls that some pairs take: all that is known of them before the tensors are known.

Host time counts, because a call of a library may take only tens of microseconds. So this is worked
out once for the pairs; a call then only makes views of the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...index_table import IndexTable, send
from ...rounding import in_steps
from ...tape import computed
from ..protocol.kernel import BackwardOperands, ForwardOperands, HostKey, Pairs
from .lowering import Window, WindowCall, lower, with_all_keys
from .spans import Spans

PACKED_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class CallLimits(NamedTuple):
    """What a library takes in one call; ``gaps`` and ``wide_right``: see :func:`.lowering.lower`.

    Attributes:
        least: no packed call says that its longest segment has fewer rows or keys than this. In a
            batch of one, a call of one segment is packed if it has fewer. (In larger batches, only
            whole entries could be packed together.)
        empty: whether a packed call of one batch entry may have segments that are empty, or that
            have only keys, at its ends, and declare longer ones than it has. Then calls of
            documents of other lengths differ in less, and one tape does for more of them.
    """

    gaps: bool = True
    wide_right: bool = True
    least: int = 0
    empty: bool = False


UNLIMITED = CallLimits()


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences end to end, the n-th rows with the n-th keys. Either may be empty: rows without
    keys give out 0, and keys without rows take gradient 0.
    """

    cu_seqlens_q: Tensor  # int32[n + 1], on the device of q
    cu_seqlens_k: Tensor
    max_seqlen_q: int  # no less than the tokens of the longest
    max_seqlen_k: int
    square: bool = False  # whether each has as many keys as rows; False where that is not known

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All but ``square``, under these names: those of flash-attn's functions."""
        return {name: getattr(self, name) for name in PACKED_ARGUMENTS}

    @property
    def kind(self) -> Hashable:
        """All but what the tensors hold, for a library that does not ask whether it is square."""
        return self.cu_seqlens_q.shape[0], self.max_seqlen_q, self.max_seqlen_k


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """One call of a library that knows windows and cu_seqlens."""

    window: Window
    packing: Packing | None  # of several segments; None where each batch entry is one sequence
    number: int = 0  # of the lowered call: the same where each batch entry takes a call of its own
    entries: int = 1  # how many batch entries it has
    entry: int | None = None  # which one, or None for all
    rows: tuple[int, int] | None = None  # (start, length) of its tokens, or None for all
    keys: tuple[int, int] | None = None
    skips_rows: bool = False  # see :class:`~.lowering.WindowCall`

    @property
    def stats_are_views(self) -> bool:
        """Whether the library's lse can be a view of an lse of all tokens. It cannot where batch
        entries are packed together, because they then lie inside the heads: [h, b l]."""
        return self.packing is None or self.entries == 1

    @cached_property
    def takes_all(self) -> bool:
        """Whether the call takes tensors as they are: nothing is cut or packed."""
        return self.packing is None and self.entry is self.rows is self.keys is None

    @property
    def kind(self) -> Hashable:
        """All of it but what the tensors of its packing hold."""
        packing = None if self.packing is None else self.packing.kind
        return *_BUT_PACKING(self), packing

    def inputs(self, given: ForwardOperands) -> ForwardOperands:
        """The operands of a forward, cut and packed."""
        q = self._cut(given.q, 1, self.rows)
        k, v = self._cut(given.k, 1, self.keys), self._cut(given.v, 1, self.keys)
        return ForwardOperands(self.pack(q), self.pack(k), self.pack(v))

    def operands(self, given: BackwardOperands) -> BackwardOperands:
        """The operands of a backward, cut and packed."""
        dout, q, out = [self.pack(self.cut_rows(t)) for t in (given.dout, given.q, given.out)]
        k, v = [self.pack(self.cut_keys(t)) for t in (given.k, given.v)]
        stats = (given.lse,) if given.dlse is None else (given.lse, given.dlse)
        packed = [self.pack_stats(self.cut_stats(t)) for t in stats]
        return BackwardOperands(dout, q, k, v, out, *packed)

    def cut_rows(self, t: Tensor) -> Tensor:
        """[b, i, h, d] of all rows -> those of the call, a view."""
        return self._cut(t, 1, self.rows)

    def cut_keys(self, t: Tensor) -> Tensor:
        """[b, j, g, d] of all keys -> those of the call, a view."""
        return self._cut(t, 1, self.keys)

    def cut_stats(self, t: Tensor) -> Tensor:
        """[b, h, i] of all rows -> those of the call, a view."""
        return self._cut(t, 2, self.rows)

    def _cut(self, t: Tensor, dim: int, tokens: tuple[int, int] | None) -> Tensor:
        if self.entry is not None:
            t = t.narrow(0, self.entry, 1)
        return t if tokens is None else t.narrow(dim, *tokens)

    def pack(self, t: Tensor) -> Tensor:
        """What was cut as the library takes it: packed [b l, h, d], a view."""
        if self.packing is None:
            return t
        return t.squeeze(0) if self.entries == 1 else t.flatten(0, 1)

    def pack_stats(self, t: Tensor) -> Tensor:
        """[b, h, l] -> packed [h, b l], a view if :attr:`stats_are_views`."""
        return self.pack(t) if self.stats_are_views else computed(_of_all_entries, t)

    def unpack(self, t: Tensor) -> Tensor:
        """:meth:`pack` undone."""
        if self.packing is None:
            return t
        return t.unsqueeze(0) if self.entries == 1 else t.unflatten(0, (self.entries, -1))

    def unpack_stats(self, t: Tensor) -> Tensor:
        """:meth:`pack_stats` undone."""
        if self.stats_are_views:
            return self.unpack(t)
        return t.unflatten(1, (self.entries, -1)).transpose(0, 1)


_BUT_PACKING = attrgetter(*(f.name for f in fields(LibraryCall) if f.name != "packing"))


@dataclass(frozen=True)
class LibraryCalls:
    """The calls of some pairs in order, and which rows and keys the lowered ones cover."""

    calls: tuple[LibraryCall, ...]
    rows: Spans
    keys: Spans
    tables: tuple[IndexTable, ...]  # of the calls' packings

    @cached_property
    def kind(self) -> Hashable:
        """What calls have in common that are launched alike, whatever is in their tables. (Which
        rows and keys they cover follows from it, and from how many there are.)"""
        return tuple([call.kind for call in self.calls])

    @cached_property
    def packed(self) -> list[Tensor]:
        """Those tables, as the calls have them."""
        packings = [call.packing for call in self.calls if call.packing is not None]
        return [t for each in packings for t in (each.cu_seqlens_q, each.cu_seqlens_k)]

    @classmethod
    def of(
        cls, pairs: Pairs, tensors: tuple[Tensor, ...], limits: CallLimits = UNLIMITED
    ) -> LibraryCalls:
        """The calls of ``pairs`` over tensors [b, l, h, d] of rows or keys, worked out once."""
        batch, device = tensors[0].shape[0], tensors[0].device
        if batch > 1:
            limits = limits._replace(empty=False)
        # Batch entries are packed together where they are end to end in memory.
        flat = batch == 1 or all(t.stride(0) == t.shape[1] * t.stride(1) for t in tensors)

        def make() -> LibraryCalls:
            windows = lowered(pairs, limits)
            if batch == 1:
                send(tables(pairs, limits), device)  # in one copy, unless they were sent before
            of_batch = _Batch(batch, flat, device, limits)
            each = (of_batch.calls(n, window, pairs) for n, window in enumerate(windows))
            calls = tuple(chain.from_iterable(each))
            rows, keys = _covered(pairs, limits)
            if len(calls) > len(windows):  # batch entries take calls of their own
                rows, keys = replace(rows, whole=False), replace(keys, whole=False)
            return cls(calls, rows, keys, tuple(of_batch.used))

        found = pairs.made((cls, limits, batch, flat, device), make)
        for table in found.tables:
            table.on(device)  # for the current stream, which may not be the one that sent it
        return found


def _of_all_entries(stats: Tensor) -> Tensor:
    """[b, h, l] -> [h, b l]."""
    return stats.transpose(0, 1).flatten(1)


def lowered(pairs: Pairs, limits: CallLimits = UNLIMITED) -> tuple[WindowCall, ...]:
    """The window calls of ``pairs``, worked out once."""
    gaps, wide_right, *_ = limits
    make = lambda: lower(pairs.slices, gaps=gaps, wide_right=wide_right)  # noqa: E731
    calls = pairs.made(HostKey("lowered", (gaps, wide_right)), make)
    if not limits.empty or len(calls) != 1 or not _is_packed(calls[0], limits.least):
        return calls
    with_keys = lambda: (with_all_keys(calls[0], pairs.k_len),)  # noqa: E731
    return pairs.made(HostKey("with all keys", (gaps, wide_right, limits.least)), with_keys)


def prepare(pairs: Pairs, limits: CallLimits = UNLIMITED) -> None:
    """Work out now, without a device, the calls of a library, by default of one that takes any
    windows."""
    for call in lowered(pairs, limits):
        call.prepare()
    _covered(pairs, limits)


def _covered(pairs: Pairs, limits: CallLimits) -> tuple[Spans, Spans]:
    """Which rows and which keys the window calls cover, worked out once."""

    def make() -> tuple[Spans, Spans]:
        windows = lowered(pairs, limits)
        rows = Spans.of([window.rows for window in windows], pairs.q_len)
        return rows, Spans.of([window.keys for window in windows], pairs.k_len)

    return pairs.made(HostKey("covered", (*limits[:2], limits.empty and limits.least)), make)


def tables(pairs: Pairs, limits: CallLimits = UNLIMITED) -> list[IndexTable]:
    """:meth:`.protocol.Kernel.tables` of a library: those of one batch entry."""
    packed = (call for call in lowered(pairs, limits) if _is_packed(call, limits.least))
    return [call.cu_seqlens for call in packed]


def _is_packed(call: WindowCall, least: int) -> bool:
    (row, last_row), (key, last_key) = call.rows, call.keys
    several = len(call.segments) > 1 or any(call.around)
    return several or min(last_row - row, last_key - key) < least


@dataclass
class _Batch:
    """Some batch entries, and the tables of the calls that they take."""

    size: int
    flat: bool  # whether they are end to end in memory
    device: torch.device
    limits: CallLimits
    used: list[IndexTable] = field(default_factory=list)

    def calls(self, number: int, call: WindowCall, pairs: Pairs) -> Iterator[LibraryCall]:
        """One call for all entries where a library can take them together, else one for each."""
        (row, last_row), (key, last_key) = call.rows, call.keys
        rows = None if call.rows == (0, pairs.q_len) else (row, last_row - row)
        keys = None if call.keys == (0, pairs.k_len) else (key, last_key - key)
        packed = _is_packed(call, self.limits.least if self.size == 1 else 0)
        together = not packed or (self.flat and rows is None and keys is None)
        entries = self.size if together else 1
        packing = None
        if packed:
            table = call.cu_seqlens if entries == 1 else call.cu_seqlens_of(entries)
            self.used.append(table)
            cu_seqlens = table.on(self.device)
            if not self.limits.empty:
                cu_seqlens = cu_seqlens[:, : entries * len(call.lengths) + 1]
            packing = _packing(call, self.limits, *cu_seqlens.unbind())
        for n in range(0, self.size, entries):
            entry = None if entries == self.size else n
            yield LibraryCall(
                call.window, packing, number, entries, entry, rows, keys, call.skips_rows
            )


def _packing(
    call: WindowCall, limits: CallLimits, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Packing:
    """A call's segments, once for each batch entry."""
    # FlashAttention-2 takes a longest of 1 to mean that every sequence has a row: some have none.
    most_rows, most_keys = max(2, limits.least, call.longest[0]), max(limits.least, call.longest[1])
    if limits.empty:
        most_rows, most_keys = in_steps(most_rows, 1), in_steps(most_keys, 1)
    return Packing(cu_seqlens_q, cu_seqlens_k, most_rows, most_keys, call.square)
