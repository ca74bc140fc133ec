"""What the attention ops share, and what tells them apart: how they say which pairs attend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..core.comm import Comm
from ..core.layout import Layout
from ..core.mask import AttnMask

Arguments = Mapping[str, Any]  # an op's arguments by name


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: not those of a graph that is being traced."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


OPTIONAL_TENSORS = ("alibi_slopes", "sink", "dropout_seed")
OPTIONS: dict[str, type] = {
    "softmax_scale": float,
    "softcap": float,
    "dropout_p": float,
    "return_lse": bool,
    "deterministic": bool,
    "reduce_dtype": str,
    "kernel": str,
    "layout": str,
    "k_layout": str,
    "team_size": int,  # 0: whatever is the fastest
    # Which part of q a call holds, if not all of it; see ``parts``. 0 parts: all.
    "row_part": int,
    "row_parts": int,
    "head_part": int,
    "head_parts": int,
    "head_total": int,
    "group": str,
}


@dataclass(frozen=True)
class Problem:
    """Which pairs attend in a call, and where the tokens lie.

    Attributes:
        key_positions: int64[k_len] array, where keys stand on the queries' scale, for ALiBi; None
            aligns the ends of the sequences.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    key_positions: Any = None


@dataclass(frozen=True)
class Family:
    """Ops that say in one way which pairs attend.

    Attributes:
        packed: q, k, v are [l, h, d] rather than [b, l, h, d].
        tensors: integer tensors after v, and how they are annotated.
        numbers: arguments that say which pairs attend, and their types.
        same_length: q and k always have as many tokens as each other.
        problem: from title, arguments, this rank's number of rows and group to the problem; raises
            ValueError where they contradict one another.
        all_rows: from arguments to the number of rows of the whole q, where q is a part of it.
        known: from arguments and lengths of q and k to the mask; None where tensors that say which
            pairs attend have no data, as in a graph.
        otherwise: likewise, to the mask that costs are taken from where it is not known.
    """

    packed: bool
    tensors: Mapping[str, str]
    numbers: Mapping[str, type]
    same_length: bool
    problem: Callable[[str, Arguments, int, Comm], Problem]
    all_rows: Callable[[Arguments], int]
    known: Callable[[Arguments, int, int], AttnMask | None]
    otherwise: Callable[[Arguments, int, int], AttnMask]

    def worst(self, given: Arguments, q_len: int, k_len: int) -> AttnMask:
        """The mask that costs are taken from."""
        known = self.known(given, q_len, k_len)
        return self.otherwise(given, q_len, k_len) if known is None else known

    @property
    def arguments(self) -> dict[str, Any]:
        """Name and type of every argument of the op in a graph, in order."""
        named: dict[str, Any] = dict.fromkeys(("q", "k", "v", *self.tensors), Tensor)
        named |= dict.fromkeys(OPTIONAL_TENSORS, Tensor | None)
        return {**named, **self.numbers, **OPTIONS}
