"""Packed documents, each attending itself: cumulative lengths, causal, a window and sink tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from annotations.library.cached_calls import typed_key

from ...core.layout import Layout
from ...core.mask import AttnMask
from ..arguments import ArgumentError, flag_of, tokens_of
from ..cu_seqlens import (
    CuSeqlens,
    as_tensor,
    check_cu_seqlens,
    check_max_seqlen,
    check_total,
    document_mask,
    document_positions,
    on_host,
    value_of,
)
from ..shard_layout import BY_DOCUMENT, layout_of
from .one_sequence import OneSequence
from .source import Arguments, MaskSource, Problem, Shards, has_data, window_numbers


@dataclass(frozen=True, slots=True)
class Documents(MaskSource):
    """Packed documents, each attending itself; decoded, their lengths are tuples, or None where
    they have no data."""

    cu_seqlens_q: CuSeqlens | None
    cu_seqlens_k: CuSeqlens | None
    causal: bool
    window_size: Sequence[int]
    sink_tokens: int = 0
    enable_ring: bool = True
    max_seqlens: tuple[int | None, int | None] = (None, None)

    packed: ClassVar[bool] = True
    tensors: ClassVar[Mapping[str, str]] = {"cu_seqlens_q": "e^", "cu_seqlens_k": "f^"}
    lengths: ClassVar[tuple[str, ...]] = tuple(tensors)
    numbers: ClassVar[Mapping[str, type]] = {
        **OneSequence.numbers,
        "max_seqlen_q": int,
        "max_seqlen_k": int,
    }

    def key(self) -> Any:
        q_values = value_of(self.cu_seqlens_q)
        same = self.cu_seqlens_k is self.cu_seqlens_q
        k_values = q_values if same else value_of(self.cu_seqlens_k)
        if q_values is None or k_values is None:
            return None
        said = self.causal, self.window_size, self.sink_tokens, self.enable_ring, self.max_seqlens
        return q_values, k_values, typed_key(said)

    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for name, cu in zip(self.tensors, (self.cu_seqlens_q, self.cu_seqlens_k), strict=True):
            if cu is None:
                raise ArgumentError(f"{op}: {name} is missing; give both, for q and for k")
            tensors[name] = as_tensor(op, name, cu)
        if not flag_of(op, "enable_ring", self.enable_ring) and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{op}: enable_ring=False is not supported in a captured graph, where an engine "
                "gives the op its group"
            )
        numbers = window_numbers(op, self.causal, self.window_size, self.sink_tokens)
        for side, most in zip("qk", self.max_seqlens, strict=True):
            name = f"max_seqlen_{side}"
            numbers[name] = -1 if most is None else tokens_of(op, name, most)
        return tensors, numbers

    @classmethod
    def decode(cls, given: Arguments) -> Documents:
        known = all(has_data(given[name]) for name in cls.tensors)
        q_ends, k_ends = (
            tuple(on_host(given[name]).tolist()) if known else None for name in cls.tensors
        )
        window = given["window_left"], given["window_right"]
        q_longest, k_longest = given["max_seqlen_q"], given["max_seqlen_k"]
        return cls(
            q_ends,
            k_ends,
            given["causal"],
            window,
            given["sink_tokens"],
            max_seqlens=(
                None if q_longest < 0 else q_longest,
                None if k_longest < 0 else k_longest,
            ),
        )

    @property
    def _ends(self) -> dict[str, np.ndarray]:
        both = zip("qk", (self.cu_seqlens_q, self.cu_seqlens_k), strict=True)
        return {side: np.asarray(cu, dtype=np.int64) for side, cu in both}

    def mask(self, q_len: int, k_len: int) -> AttnMask | None:
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None
        cu, (left, right) = self._ends, self.window_size
        if (cu["q"][-1], cu["k"][-1]) != (q_len, k_len):
            return None
        return document_mask(cu["q"], cu["k"], self.causal, (left, right), self.sink_tokens)

    def worst(self, q_len: int, k_len: int) -> AttnMask:
        """One document as long as all, where lengths are not known."""
        known = self.mask(q_len, k_len)
        whole = OneSequence(self.causal, self.window_size, self.sink_tokens)
        return whole.mask(q_len, k_len) if known is None else known

    def whole_rows(self, keys: int) -> int:
        return int(self._ends["q"][-1])

    def problem(self, op: str, shards: Shards) -> Problem:
        """The totals come from ``cu_seqlens``, so no rank asks another."""
        cu, comm = self._ends, shards.comm
        for side, longest in zip("qk", self.max_seqlens, strict=True):
            check_cu_seqlens(op, f"cu_seqlens_{side}", cu[side])
            check_max_seqlen(op, f"max_seqlen_{side}", -1 if longest is None else longest, cu[side])
        if len(cu["q"]) != len(cu["k"]):
            raise ArgumentError(
                f"{op}: cu_seqlens_q has {len(cu['q']) - 1} documents and cu_seqlens_k "
                f"{len(cu['k']) - 1}"
            )
        if comm.size == 1:
            check_total(op, "cu_seqlens_q", cu["q"], shards.rows)
            check_total(op, "cu_seqlens_k", cu["k"], shards.keys)
        q_total, k_total = int(cu["q"][-1]), int(cu["k"][-1])
        spec, k_spec = shards.layout, shards.k_layout
        if spec == BY_DOCUMENT:
            spec = Layout.zigzag(q_total, comm.size, cu["q"]).spec
            k_spec = Layout.zigzag(k_total, comm.size, cu["k"]).spec
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
        mask = self.mask(q_total, k_total)
        assert mask is not None
        positions = document_positions(cu["q"], cu["k"]) if shards.aligned else None
        return Problem(mask, q_layout, k_layout, positions)
