"""How a call says which pairs attend: the one thing in which attention ops differ.

    OneSequence     causal, a window and sink tokens, over [b, l, h, d]
    PackedSequence  the same inside each packed document, over [l, h, d] and cumulative lengths
    Masked          any AttnMask, over [b, l, h, d]

A source holds what the user passed, unchecked, or what an op in a graph was given
(:meth:`MaskSource.decode`), which is valid. Only a decoded source is asked for its mask. The first
two are in :mod:`.window_source`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from annotations.after_import import constant_when_compiled
from annotations.library.cached_calls import cached

from ..core.comm import Comm
from ..core.layout import Layout
from ..core.mask import AttnMask
from .arguments import require
from .tokens.call_layouts import layout_of
from .tokens.lengths import has_data

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
        rows, keys: tokens of q and of k on this rank. Where q is one part of its rows, ``rows``
            counts the whole q.
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
    """What determines the mask of a call.

    Attributes:
        packed: q, k, v are [l, h, d] rather than [b, l, h, d].
        same_length: q and k always have as many tokens as each other.
        tensors: the op's integer tensors, which stand after v, and their annotations.
        lengths: those of ``tensors`` that are cumulative lengths.
        numbers: the op's numbers that say which pairs attend, and their types.
        enable_ring: as the user passed it; False computes on this rank alone.
    """

    __slots__ = ()

    packed: ClassVar[bool] = False
    same_length: ClassVar[bool] = False
    tensors: ClassVar[Mapping[str, str]] = {}
    lengths: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[Mapping[str, type]]
    enable_ring = True

    @abstractmethod
    def key(self) -> tuple[Any, Any] | None:
        """A hashable key of what the user passed, with types; None where it is not at hand. Its
        second part is what may be new in every step and says nothing of the op's other arguments.
        """

    @abstractmethod
    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The op's integer tensors and numbers."""

    @classmethod
    @abstractmethod
    def decode(cls, given: Arguments) -> MaskSource:
        """From an op's arguments. Tensors without data leave the mask unknown."""

    def known_as(self, decoded: MaskSource) -> tuple[MaskSource, AttnMask] | None:
        """This source, decoded, and its mask. None where the mask was not made before.

        Args:
            decoded: of another call, from which this one differs in the second part of its key
                alone.
        """
        return None

    @abstractmethod
    def mask(self, q_len: int, k_len: int) -> AttnMask | None:
        """The mask over ``q_len`` and ``k_len`` tokens; None where it is not known."""

    @abstractmethod
    def problem(self, op: str, shards: Shards) -> Problem:
        """The mask and the layouts of a call."""

    def worst(self, q_len: int, k_len: int) -> AttnMask:
        """The mask that costs are taken from: where it is not known, all pairs."""
        known = self.mask(q_len, k_len)
        return AttnMask.dense(q_len, k_len) if known is None else known

    def whole_rows(self, keys: int) -> int:
        """Tokens of the whole q, where a call holds one part of them and ``keys`` keys."""
        return keys

    def row_layout(self, layout: str, rows: int, parts: int) -> Layout | None:
        """The layout, from its text, that cuts ``rows`` rows into ``parts``; None: contiguously."""
        return Layout.parse(layout) if layout and parts > 1 else None


@dataclass(frozen=True, slots=True)
class Masked(MaskSource):
    """Any mask, over q and k of any lengths; None once decoded, if its slices have no data."""

    mask_value: AttnMask | None
    q_len: int = 0
    k_len: int = 0

    tensors: ClassVar[Mapping[str, str]] = {"mask_slices": "s^ 6"}
    numbers: ClassVar[Mapping[str, type]] = {"q_len": int, "k_len": int}

    def key(self) -> tuple[Any, Any] | None:
        return ((), self.mask_value.key) if isinstance(self.mask_value, AttnMask) else None

    def encode(self, op: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        mask: Any = self.mask_value
        require(
            isinstance(mask, AttnMask), op, "mask", "an AttnMask, such as AttnMask.causal(l)", mask
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
    return AttnMask._from_bytes(slices, q_len, k_len)  # of an AttnMask, so valid and disjoint


_slices_tensors: dict[bytes, Tensor] = {}


@constant_when_compiled
def _slices_tensor(slices: bytes) -> Tensor:
    """The slices of a mask, int64[n, 6]: from bytes, which torch.compile takes for a constant."""
    known = _slices_tensors.get(slices)
    if known is None:
        table = np.frombuffer(slices, dtype=np.int64).reshape(-1, 6)
        known = made = torch.from_numpy(table.copy())
        # Kept for the next call, except a tensor that stands in a graph being traced.
        if not isinstance(made, FakeTensor):
            cached(_slices_tensors, slices, lambda: made, 64)
    return known
