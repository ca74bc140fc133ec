"""Sequences and packed documents, each attending itself: causal, a window and sink tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from annotations.library.cached_calls import cached, typed_key

from ..core.arrays import Ints
from ..core.layout import Layout
from ..core.mask import AttnMask
from .arguments import ArgumentError, flag_of, tokens_of, window_bounds
from .mask_source import Arguments, MaskSource, Problem, Shards
from .tokens.call_layouts import (
    BALANCED_NAME,
    balanced_layout,
    by_lengths,
    check_batch,
    layout_by_lengths,
    layout_of,
)
from .tokens.lengths import (
    CuSeqlens,
    as_tensor,
    check_cu_seqlens,
    check_max_seqlen,
    check_total,
    has_data,
    on_host,
    value_of,
)


@dataclass(frozen=True, slots=True)
class OneSequence(MaskSource):
    """One sequence for each batch entry."""

    causal: bool
    window_size: Sequence[int]
    sink_tokens: int = 0
    enable_ring: bool = True
    max_seqlens: tuple[int | None, int | None] = (None, None)

    same_length: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, type]] = {
        "causal": bool,
        "window_left": int,
        "window_right": int,
        "sink_tokens": int,
    }

    def key(self) -> tuple[Any, Any] | None:
        return self._but_documents, ()

    @property
    def _but_documents(self) -> Any:
        return typed_key(
            (self.causal, self.window_size, self.sink_tokens, self.enable_ring, self.max_seqlens)
        )

    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        flag_of(op, "enable_ring", self.enable_ring)
        for side, longest in zip("qk", self.max_seqlens, strict=True):
            if longest is not None:
                raise ArgumentError(
                    f"{op}: max_seqlen_{side} goes with cu_seqlens_q and cu_seqlens_k, which "
                    f"are not given; leave it None, got {longest!r}"
                )
        return {}, self._checked_numbers(op)

    def _checked_numbers(self, op: str) -> dict[str, Any]:
        """The numbers of :attr:`OneSequence.numbers`, checked."""
        left, right = window_bounds(op, self.window_size)
        return {
            "causal": flag_of(op, "causal", self.causal),
            "window_left": left,
            "window_right": right,
            "sink_tokens": tokens_of(op, "sink_tokens", self.sink_tokens),
        }

    @classmethod
    def decode(cls, given: Arguments) -> OneSequence:
        window = given["window_left"], given["window_right"]
        return cls(given["causal"], window, given["sink_tokens"])

    def mask(self, q_len: int, k_len: int) -> AttnMask | None:
        return self._mask((0, q_len), (0, k_len))

    def _mask(self, q_ends: Sequence[int], k_ends: Sequence[int]) -> AttnMask:
        """The mask of documents with these cumulative lengths."""
        key = self._mask_key(q_ends, k_ends)

        def make() -> AttnMask:
            of_q, of_k, causal, window, sinks = key
            return AttnMask.varlen(of_q, of_k, causal=causal, window=window, global_tokens=sinks)

        return cached(_MASKS, key, make, MOST_MASKS)

    def _mask_key(self, q_ends: Sequence[int], k_ends: Sequence[int]) -> tuple[Any, ...]:
        """All that the mask of documents with these cumulative lengths depends on."""
        of_q, of_k, (left, right) = tuple(q_ends), tuple(k_ends), self.window_size
        if of_q == of_k:  # without empty documents, with which graphs fill lengths up
            of_q = of_k = _without_empty(of_q)
        return of_q, of_k, self.causal, (left, right), self.sink_tokens

    def problem(self, op: str, shards: Shards) -> Problem:
        layout = layout_of(op, shards.comm, "layout", shards.layout, shards.rows, None)
        return Problem(self._mask((0, layout.total), (0, layout.total)), layout, layout)


@dataclass(frozen=True, slots=True)
class PackedSequence(OneSequence):
    """Packed documents, each attending itself. Once decoded, their lengths are tuples, or None if
    they have no data."""

    cu_seqlens_q: CuSeqlens | None = None
    cu_seqlens_k: CuSeqlens | None = None

    packed: ClassVar[bool] = True
    same_length: ClassVar[bool] = False
    tensors: ClassVar[Mapping[str, str]] = {"cu_seqlens_q": "e^", "cu_seqlens_k": "f^"}
    lengths: ClassVar[tuple[str, ...]] = tuple(tensors)
    numbers: ClassVar[Mapping[str, type]] = {
        **OneSequence.numbers,
        "max_seqlen_q": int,
        "max_seqlen_k": int,
    }

    def key(self) -> tuple[Any, Any] | None:
        q_values = value_of(self.cu_seqlens_q)
        same = self.cu_seqlens_k is self.cu_seqlens_q
        k_values = q_values if same else value_of(self.cu_seqlens_k)
        if q_values is None or k_values is None:
            return None
        return self._but_documents, (q_values, k_values)

    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for name, cu in zip(self.tensors, (self.cu_seqlens_q, self.cu_seqlens_k), strict=True):
            if cu is None:
                raise ArgumentError(f"{op}: {name} is missing; give both, for q and for k")
            known = tensors.get("cu_seqlens_q") if cu is self.cu_seqlens_q else None
            tensors[name] = as_tensor(op, name, cu) if known is None else known
        if not flag_of(op, "enable_ring", self.enable_ring) and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{op}: enable_ring=False is not supported in a captured graph, where an engine "
                "gives the op its group"
            )
        numbers = self._checked_numbers(op)
        for side, most in zip("qk", self.max_seqlens, strict=True):
            name = f"max_seqlen_{side}"
            numbers[name] = -1 if most is None else tokens_of(op, name, most)
        return tensors, numbers

    @classmethod
    def decode(cls, given: Arguments) -> PackedSequence:
        q_ends, k_ends = (given[name] for name in cls.tensors)
        same, known = k_ends is q_ends, has_data(q_ends) and has_data(k_ends)
        of_q = tuple(on_host(q_ends).tolist()) if known else None
        of_k = tuple(on_host(k_ends).tolist()) if known and not same else of_q
        most = [given[f"max_seqlen_{side}"] for side in "qk"]
        q_longest, k_longest = (None if tokens < 0 else tokens for tokens in most)
        window = given["window_left"], given["window_right"]
        longest = q_longest, k_longest
        return cls(given["causal"], window, given["sink_tokens"], True, longest, of_q, of_k)

    def known_as(self, decoded: MaskSource) -> tuple[MaskSource, AttnMask] | None:
        cu: Any = self.cu_seqlens_q
        if cu is not self.cu_seqlens_k or self.max_seqlens != (None, None):
            return None
        if isinstance(cu, Tensor) and cu.ndim == 1:
            cu = on_host(cu).tolist()
        elif not isinstance(cu, (list, tuple)):
            return None
        ends = tuple(cu)
        assert isinstance(decoded, PackedSequence)
        source = replace(decoded, cu_seqlens_q=ends, cu_seqlens_k=ends)
        mask = _MASKS.get(source._mask_key(ends, ends))
        return None if mask is None else (source, mask)

    @property
    def _ends(self) -> tuple[Ints, Ints]:
        q_ends = np.asarray(self.cu_seqlens_q, np.int64)
        same = self.cu_seqlens_k is self.cu_seqlens_q
        return q_ends, q_ends if same else np.asarray(self.cu_seqlens_k, np.int64)

    def mask(self, q_len: int, k_len: int) -> AttnMask | None:
        q_ends: Any = self.cu_seqlens_q
        k_ends: Any = self.cu_seqlens_k
        known = q_ends is not None and k_ends is not None
        fits = known and (q_ends[-1], k_ends[-1]) == (q_len, k_len)
        return self._mask(q_ends, k_ends) if fits else None

    def worst(self, q_len: int, k_len: int) -> AttnMask:
        """Where lengths are not known, the mask of one document as long as all together."""
        known = self.mask(q_len, k_len)
        return self._mask((0, q_len), (0, k_len)) if known is None else known

    def whole_rows(self, keys: int) -> int:
        return int(self._ends[0][-1])

    def row_layout(self, layout: str, rows: int, parts: int) -> Layout | None:
        if by_lengths(layout):
            return layout_by_lengths(layout, self._ends[0], parts) if parts > 1 else None
        return MaskSource.row_layout(self, layout, rows, parts)

    def problem(self, op: str, shards: Shards) -> Problem:
        """The totals come from ``cu_seqlens``, so no rank asks another."""
        q_ends, k_ends = self._ends
        comm, held = shards.comm, (shards.rows, shards.keys)
        same = k_ends is q_ends
        for side, ends, longest in zip("qk", (q_ends, k_ends), self.max_seqlens, strict=True):
            if side == "q" or not same:
                check_cu_seqlens(op, f"cu_seqlens_{side}", ends)
            if longest is not None:
                check_max_seqlen(op, f"max_seqlen_{side}", longest, ends)
        if len(q_ends) != len(k_ends):
            raise ArgumentError(
                f"{op}: cu_seqlens_q has {len(q_ends) - 1} documents and cu_seqlens_k "
                f"{len(k_ends) - 1}"
            )
        if comm.size == 1:
            for side, ends, tokens in zip("qk", (q_ends, k_ends), held, strict=True):
                check_total(op, f"cu_seqlens_{side}", ends, tokens)
        q_total, k_total = int(q_ends[-1]), int(k_ends[-1])
        spec, k_spec = shards.layout, shards.k_layout
        of_q = q_ends.tolist()
        mask = self._mask(of_q, of_q if same else k_ends.tolist())
        if spec == BALANCED_NAME and np.array_equal(q_ends, k_ends):
            spec = balanced_layout(mask, comm.size, comm.costs.topology).spec
        if by_lengths(spec):
            spec, k_spec = (layout_by_lengths(spec, e, comm.size).spec for e in (q_ends, k_ends))
        if spec and not k_spec:
            if q_total != k_total:
                raise ArgumentError(
                    f"{op}: layout={spec} is for q, but cu_seqlens_q end at {q_total} and "
                    f"cu_seqlens_k at {k_total}; give k_layout too, or neither, and both are cut "
                    "contiguously"
                )
            k_spec = spec
        q_layout = layout_of(op, comm, "layout", spec, shards.rows, q_total)
        k_layout = layout_of(op, comm, "k_layout", k_spec, shards.keys, k_total)
        attends = self.causal, (self.window_size[0], self.window_size[1]), self.sink_tokens
        check_batch(op, q_layout, q_ends, attends, comm.rank)
        positions = _key_positions(q_ends, k_ends) if shards.aligned else None
        return Problem(mask, q_layout, k_layout, positions)


def sequence_or_documents(
    causal: bool,
    window_size: Sequence[int],
    sink_tokens: int,
    enable_ring: bool,
    max_seqlens: tuple[int | None, int | None],
    cu_seqlens_q: CuSeqlens | None,
    cu_seqlens_k: CuSeqlens | None,
) -> OneSequence:
    """:class:`PackedSequence` where either of the cumulative lengths is given."""
    said = causal, window_size, sink_tokens, enable_ring, max_seqlens
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return OneSequence(*said)
    return PackedSequence(*said, cu_seqlens_q, cu_seqlens_k)


MOST_MASKS = 256
# By value: the layers and the backward of a batch share one mask.
_MASKS: dict[tuple[Any, ...], AttnMask] = {}


def know_mask(ends: Sequence[int], causal: bool, window: Sequence[int], mask: AttnMask) -> None:
    """Let attention of documents with these cumulative lengths find their mask, which was made
    elsewhere: in a thread, or by the worker of a DataLoader."""
    held = _without_empty(ends)
    cached(_MASKS, (held, held, causal, tuple(window), 0), lambda: mask, MOST_MASKS)


def _without_empty(ends: Sequence[int]) -> tuple[int, ...]:
    """Cumulative lengths of the documents that have tokens."""
    return tuple(end for end, _ in groupby(ends))


def _key_positions(q_ends: Ints, k_ends: Ints) -> Ints | None:
    """Where each key stands on the queries' scale, with the ends of a document's queries and keys
    aligned; None where the two have the same lengths."""
    if np.array_equal(q_ends, k_ends):
        return None
    corner = np.repeat(k_ends[1:] - q_ends[1:], np.diff(k_ends))
    return np.arange(k_ends[-1]) - corner
