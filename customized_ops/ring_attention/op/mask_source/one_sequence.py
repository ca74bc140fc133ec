"""One sequence for each batch entry: causal, a window and sink tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from annotations.library.cached_calls import typed_key

from ...core.mask import AttnMask
from ..arguments import ArgumentError, flag_of
from ..shard_layout import layout_of
from .source import Arguments, MaskSource, Problem, Shards, window_numbers


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

    def key(self) -> Any:
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
        return {}, window_numbers(op, self.causal, self.window_size, self.sink_tokens)

    @classmethod
    def decode(cls, given: Arguments) -> OneSequence:
        window = given["window_left"], given["window_right"]
        return cls(given["causal"], window, given["sink_tokens"])

    def mask(self, q_len: int, k_len: int) -> AttnMask:
        left, right = self.window_size
        return _sequence_mask(q_len, k_len, self.causal, (left, right), self.sink_tokens)

    def problem(self, op: str, shards: Shards) -> Problem:
        layout = layout_of(op, shards.comm, "layout", shards.layout, shards.rows, None)
        return Problem(self.mask(layout.total, layout.total), layout, layout)


@lru_cache(maxsize=256)
def _sequence_mask(
    q_len: int, k_len: int, causal: bool, window: tuple[int, int], sink_tokens: int
) -> AttnMask:
    cu = [0, q_len], [0, k_len]
    return AttnMask.varlen(*cu, causal=causal, window=window, global_tokens=sink_tokens)
