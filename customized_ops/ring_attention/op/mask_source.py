"""How a call says which pairs attend: the one thing in which attention ops differ.

    OneSequence     causal, a window and sink tokens, over [b, l, h, d]
    Documents       the same inside each packed document, over [l, h, d] and cumulative lengths
    Masked          any AttnMask, over [b, l, h, d]

A source holds what the user passed, unchecked, or what an op in a graph was given
(:meth:`MaskSource.decode`), which is sound. Only of the second are masks asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from annotations.library.cached_calls import typed_key

from ..core.comm import Comm
from ..core.layout import Layout
from ..core.mask import AttnMask
from .arguments import ArgumentError, flag_of, tokens_of, window_bounds
from .cu_seqlens import (
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
from .shard_layout import BY_DOCUMENT, layout_of

Arguments = Mapping[str, Any]  # an op's arguments by name


class Problem(NamedTuple):
    """Which pairs attend in a call, and where its tokens are.

    Attributes:
        key_positions: int64[k_len] array, where keys stand on the queries' scale, for ALiBi; None
            aligns the ends of the sequences.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    key_positions: Any = None


class Shards(NamedTuple):
    """What one rank holds of a call.

    Attributes:
        rows, keys: tokens of q and of k on this rank; of all of q where that is one part of it.
        layout, k_layout: as text; ``""`` where none was given.
        aligned: whether scores depend on the distance of a row and a key (ALiBi).
    """

    comm: Comm
    rows: int
    keys: int
    layout: str
    k_layout: str
    aligned: bool


class MaskSource(ABC):
    """What tells the mask of a call.

    Attributes:
        packed: q, k, v are [l, h, d] rather than [b, l, h, d].
        same_length: q and k always have as many tokens as each other.
        tensors: the op's integer tensors, which stand after v, and their annotations.
        numbers: the op's numbers that say which pairs attend, and their types.
    """

    __slots__ = ()

    packed: ClassVar[bool] = False
    same_length: ClassVar[bool] = False
    tensors: ClassVar[Mapping[str, str]] = {}
    numbers: ClassVar[Mapping[str, type]]

    @abstractmethod
    def key(self) -> Any:
        """What the user passed, typed and with a hash; None where that is not at hand."""

    @abstractmethod
    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The op's integer tensors and numbers.

        Raises:
            ArgumentError: what the user passed is out of range.
        """

    @classmethod
    @abstractmethod
    def decode(cls, given: Arguments) -> MaskSource:
        """From an op's arguments. Tensors without data leave the mask unknown."""

    @abstractmethod
    def mask(self, q_len: int, k_len: int) -> AttnMask | None:
        """The mask over so many tokens; None where it is not known."""

    @abstractmethod
    def problem(self, op: str, shards: Shards) -> Problem:
        """The mask and the layouts of a call.

        Raises:
            ArgumentError: lengths, layouts and what a rank holds contradict one another.
        """

    def worst(self, q_len: int, k_len: int) -> AttnMask:
        """The mask that costs are taken from: where it is not known, all pairs."""
        known = self.mask(q_len, k_len)
        return AttnMask.dense(q_len, k_len) if known is None else known

    def whole_rows(self, keys: int) -> int:
        """Tokens of the whole q, where a call holds one part of them and ``keys`` keys."""
        return keys


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: not those of a graph that is being traced."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


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
        return {}, _window_numbers(op, self.causal, self.window_size, self.sink_tokens)

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
        numbers = _window_numbers(op, self.causal, self.window_size, self.sink_tokens)
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


def _window_numbers(
    op: str, causal: bool, window_size: Sequence[int], sink_tokens: int
) -> dict[str, Any]:
    left, right = window_bounds(op, window_size)
    return {
        "causal": flag_of(op, "causal", causal),
        "window_left": left,
        "window_right": right,
        "sink_tokens": tokens_of(op, "sink_tokens", sink_tokens),
    }


@lru_cache(maxsize=256)
def _sequence_mask(
    q_len: int, k_len: int, causal: bool, window: tuple[int, int], sink_tokens: int
) -> AttnMask:
    cu = [0, q_len], [0, k_len]
    return AttnMask.varlen(*cu, causal=causal, window=window, global_tokens=sink_tokens)


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
