"""Any mask, over q and k of any lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...core.mask import AttnMask
from ..arguments import ArgumentError
from ..shard_layout import layout_of
from .source import Arguments, MaskSource, Problem, Shards, has_data


@dataclass(frozen=True, slots=True)
class Masked(MaskSource):
    """Any mask; decoded, it is None where its slices have no data."""

    mask_value: AttnMask | None
    q_len: int = 0
    k_len: int = 0

    tensors: ClassVar[Mapping[str, str]] = {"mask_slices": "s^ 6"}
    numbers: ClassVar[Mapping[str, type]] = {"q_len": int, "k_len": int}

    def key(self) -> Any:
        return self.mask_value.key if isinstance(self.mask_value, AttnMask) else None

    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        mask = self.mask_value
        if not isinstance(mask, AttnMask):
            raise ArgumentError(
                f"{op}: mask must be an AttnMask, such as AttnMask.causal(l), got {mask!r}"
            )
        slices = {"mask_slices": _slices_tensor(mask.key[2])}
        return slices, {"q_len": mask.q_len, "k_len": mask.k_len}

    @classmethod
    def decode(cls, given: Arguments) -> Masked:
        lengths, mask = (given["q_len"], given["k_len"]), None
        if has_data(given["mask_slices"]):
            slices = given["mask_slices"].detach().cpu().numpy()
            mask = _mask_from_bytes(slices.tobytes(), *lengths)
        return cls(mask, *lengths)

    def mask(self, q_len: int, k_len: int) -> AttnMask | None:
        return self.mask_value if q_len == self.q_len else None

    def whole_rows(self, keys: int) -> int:
        return self.q_len

    def problem(self, op: str, shards: Shards) -> Problem:
        mask = self.mask_value
        assert mask is not None
        k_spec = shards.k_layout or (shards.layout if mask.q_len == mask.k_len else "")
        q_layout = layout_of(op, shards.comm, "layout", shards.layout, shards.rows, mask.q_len)
        k_layout = layout_of(op, shards.comm, "k_layout", k_spec, shards.keys, mask.k_len)
        return Problem(mask, q_layout, k_layout)


@lru_cache(maxsize=256)
def _mask_from_bytes(slices: bytes, q_len: int, k_len: int) -> AttnMask:
    # Sound, and disjoint: they come from an AttnMask.
    return AttnMask._from_bytes(slices, q_len, k_len)


_slices_tensors: dict[bytes, Tensor] = {}


@torch.compiler.assume_constant_result
def _slices_tensor(slices: bytes) -> Tensor:
    """The slices of a mask, int64[n, 6]: from bytes, which torch.compile takes for a constant."""
    known = _slices_tensors.get(slices)
    if known is None:
        table = np.frombuffer(slices, dtype=np.int64).reshape(-1, 6)
        known = torch.from_numpy(table.copy())
        # Kept for the next call, but for one that stands in a graph being traced.
        if not isinstance(known, FakeTensor):
            if len(_slices_tensors) == 64:
                del _slices_tensors[next(iter(_slices_tensors))]
            _slices_tensors[slices] = known
    return known
