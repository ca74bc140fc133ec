"""What every mask source knows, and what a call's mask and layouts are made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...core.comm import Comm
from ...core.layout import Layout
from ...core.mask import AttnMask
from ..arguments import flag_of, tokens_of, window_bounds

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
        lengths: those of ``tensors`` that are cumulative lengths.
        numbers: the op's numbers that say which pairs attend, and their types.
    """

    __slots__ = ()

    packed: ClassVar[bool] = False
    same_length: ClassVar[bool] = False
    tensors: ClassVar[Mapping[str, str]] = {}
    lengths: ClassVar[tuple[str, ...]] = ()
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


def window_numbers(
    op: str, causal: bool, window_size: Sequence[int], sink_tokens: int
) -> dict[str, Any]:
    """The numbers of an op that say which tokens of a sequence attend, checked."""
    left, right = window_bounds(op, window_size)
    return {
        "causal": flag_of(op, "causal", causal),
        "window_left": left,
        "window_right": right,
        "sink_tokens": tokens_of(op, "sink_tokens", sink_tokens),
    }
