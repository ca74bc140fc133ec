"""The options of every attention function: as users pass them, and as ops in a graph hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.merge.merge import accumulation_dtype
from .arguments import ArgumentError, flag_of, is_integer


class SharedOptions(TypedDict, total=False):
    """What every attention function takes by keyword; :data:`.documentation.ARGUMENTS` says what
    each means."""

    softcap: float
    sink: Tensor | None
    dropout_seed: int | Tensor | None
    layout: Layout | None
    kernel: str
    reduce_dtype: torch.dtype | None
    q_rows: tuple[int, int] | None
    q_heads: tuple[int, int] | None


class Options(NamedTuple):
    """The options of one call as the user passed them, not yet checked."""

    softmax_scale: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    softcap: float = 0.0
    layout: Layout | None = None
    k_layout: Layout | None = None
    kernel: str = "auto"
    use_cute: bool = False
    reduce_dtype: torch.dtype | None = None
    q_rows: tuple[int, int] | None = None
    q_heads: tuple[int, int] | None = None
    team_size: int | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_seed: int | Tensor | None = None

    @property
    def numbers(self) -> tuple[Any, ...]:
        """All but the three that may be tensors, which stand last."""
        return self[:-3]

    def tensors(self, op: str, q: Tensor) -> dict[str, Tensor | None]:
        """The optional tensors of the op; a seed that is None is drawn from torch's generator.

        Raises:
            ArgumentError: one that does not fit q.
        """
        heads = q.shape[-2]
        return {
            "alibi_slopes": _slopes(op, self.alibi_slopes, heads),
            "sink": _sink(op, self.sink, heads),
            "dropout_seed": _seed(op, self.dropout_seed, dropout_of(op, self.dropout_p), q),
        }

    def parts(self, op: str, q: Tensor) -> dict[str, Any]:
        """The numbers of the op on which its annotation depends.

        Raises:
            ArgumentError: one that is out of range.
        """
        row_part, row_parts = part_of(op, "q_rows", self.q_rows)
        head_part, head_parts = part_of(op, "q_heads", self.q_heads)
        return {
            "dropout_p": dropout_of(op, self.dropout_p),
            "row_part": row_part,
            "row_parts": row_parts,
            "head_part": head_part,
            "head_parts": head_parts,
            "head_total": head_parts * int(q.shape[-2]) if head_parts and q.ndim > 1 else 0,
        }

    def checked(self, op: str, q: Tensor) -> OpOptions:
        """All numbers of the op.

        Raises:
            ArgumentError: one that is out of range.
        """
        deterministic = flag_of(op, "deterministic", self.deterministic)
        return OpOptions(
            **self.parts(op, q),
            softmax_scale=_scale(op, self.softmax_scale, q),
            softcap=softcap_of(op, self.softcap),
            return_lse=flag_of(op, "return_lse", self.return_lse),
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
            reduce_dtype=reduce_dtype_of(op, self.reduce_dtype, q),
            kernel=_kernel(op, self.kernel, self.use_cute),
            layout=spec_of(op, "layout", self.layout),
            k_layout=spec_of(op, "k_layout", self.k_layout),
            team_size=_team_size(op, self.team_size),
        )


class OpOptions(NamedTuple):
    """The options of one call as its op in a graph holds them: numbers and text, all sound.

    Attributes:
        layout, k_layout: the text of a layout; ``""`` where none was given.
        team_size: 0 where the plan chooses.
        row_part, row_parts: q is part ``row_part`` of ``row_parts`` of its rows; 0 parts: all rows.
        head_part, head_parts, head_total: the same of its heads, of which there are ``head_total``.
    """

    softmax_scale: float
    softcap: float
    dropout_p: float
    return_lse: bool
    deterministic: bool
    reduce_dtype: str
    kernel: str
    layout: str
    k_layout: str
    team_size: int
    row_part: int
    row_parts: int
    head_part: int
    head_parts: int
    head_total: int

    @classmethod
    def decode(cls, given: Mapping[str, Any]) -> OpOptions:
        """From an op's arguments by name."""
        return cls(*[given[name] for name in cls._fields])


OPTIONAL_TENSORS = ("alibi_slopes", "sink", "dropout_seed")
# Names and types of the op's last arguments, in order.
OP_OPTIONS: dict[str, Any] = {**get_type_hints(OpOptions), "group": str}

# By the names that they have as op arguments.
REDUCE_DTYPES: dict[str, torch.dtype | None] = {
    "": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _number(op: str, name: str, value: Any, fits: str = "a number") -> float:
    numeric = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not numeric:
        raise ArgumentError(f"{op}: {name} must be {fits}, got {value!r}")
    return float(value)


def _scale(op: str, softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        if q.shape[-1] == 0:
            raise ArgumentError(
                f"{op}: softmax_scale must be given where the head dim of q is 0, got None for "
                f"q of shape {tuple(q.shape)}"
            )
        return float(q.shape[-1] ** -0.5)
    value = _number(op, "softmax_scale", softmax_scale, "a number or None")
    if not -math.inf < value < math.inf:
        raise ArgumentError(f"{op}: softmax_scale must be finite, got {softmax_scale!r}")
    return value


def softcap_of(op: str, softcap: float) -> float:
    """The cap of scores, 0 for none.

    Raises:
        ArgumentError: not a number, negative or not finite.
    """
    value = _number(op, "softcap", softcap)
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{op}: softcap must be 0 (none) or above, got {softcap!r}")
    return value


def dropout_of(op: str, dropout_p: float) -> float:
    """The dropout probability.

    Raises:
        ArgumentError: not in [0, 1).
    """
    value = _number(op, "dropout_p", dropout_p)
    if not 0 <= value < 1:
        raise ArgumentError(f"{op}: dropout_p must be in [0, 1), got {dropout_p!r}")
    return value


def spec_of(op: str, name: str, layout: Layout | None) -> str:
    """The layout as an op argument; ``""`` if None.

    Raises:
        ArgumentError: not a Layout.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise ArgumentError(f"{op}: {name} must be a Layout or None, got {layout!r}")
    return "" if layout is None else layout.spec


def reduce_dtype_of(op: str, dtype: torch.dtype | None, q: Tensor) -> str:
    """The dtype that gradients travel in as an op argument; ``""`` if None.

    Raises:
        ArgumentError: none of those that sums of the gradients of q hold.
    """
    width = accumulation_dtype(q.dtype).itemsize
    fits = {name: d for name, d in REDUCE_DTYPES.items() if d is None or d.itemsize <= width}
    for name, each in fits.items():
        if dtype is each:
            return name
    known = ", ".join(map(str, fits.values()))
    raise ArgumentError(
        f"{op}: reduce_dtype must be one of {known} where q is {q.dtype}, got {dtype!r}"
    )


def _kernel(op: str, kernel: str, use_cute: bool) -> str:
    if not isinstance(kernel, str):
        raise ArgumentError(f"{op}: kernel must be the name of one, or 'auto', got {kernel!r}")
    if not flag_of(op, "use_cute", use_cute):
        return kernel
    if kernel not in ("auto", "flash4"):
        raise ArgumentError(
            f"{op}: use_cute=True asks for kernel 'flash4', but kernel is {kernel!r}; give one"
        )
    return "flash4"


def _team_size(op: str, team_size: int | None) -> int:
    if team_size is not None and not is_integer(team_size, 1):
        raise ArgumentError(
            f"{op}: team_size must be a number of ranks, 1 or more, or None, got {team_size!r}"
        )
    return int(team_size or 0)


def part_of(op: str, name: str, part: tuple[int, int] | None) -> tuple[int, int]:
    """``q_rows`` or ``q_heads`` as (part, parts); (0, 0) if None.

    Raises:
        ArgumentError: not (i, n) with 0 <= i < n.
    """
    if part is None:
        return 0, 0
    pair = tuple(part) if isinstance(part, Sequence) else ()
    if len(pair) != 2 or not all(map(is_integer, pair)) or not pair[0] < pair[1]:
        raise ArgumentError(
            f"{op}: {name} must be (i, n) for part i of n, 0 <= i < n, or None, got {part!r}"
        )
    return int(pair[0]), int(pair[1])


def _seed(op: str, seed: int | Tensor | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """int64[1], drawn on q's device if None; None without dropout, which needs no seed."""
    if isinstance(seed, Tensor):
        fits = seed.dtype == torch.int64 and seed.numel() == 1
    else:
        fits = seed is None or is_integer(seed, -(2**63))
    if not fits:
        raise ArgumentError(
            f"{op}: dropout_seed must be an int, an int64 tensor of one element or None, "
            f"got {seed!r}"
        )
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    return torch.tensor([int(seed)], dtype=torch.int64)


def _slopes(op: str, slopes: Tensor | None, heads: int) -> Tensor | None:
    """[h] or [b, h]; the batch is checked against the annotation."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or not slopes.dtype.is_floating_point:
        raise ArgumentError(f"{op}: alibi_slopes must be a floating tensor, got {slopes!r}")
    if slopes.ndim not in (1, 2) or slopes.shape[-1] != heads:
        raise ArgumentError(
            f"{op}: alibi_slopes must be [h] or [b, h] with h = {heads} heads of q, got shape "
            f"{tuple(slopes.shape)}"
        )
    if slopes.requires_grad:
        raise ArgumentError(
            f"{op}: alibi_slopes require a gradient, which they do not get; pass slopes.detach()"
        )
    return slopes


def _sink(op: str, sink: Tensor | None, heads: int) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        raise ArgumentError(f"{op}: sink must be a floating tensor [h] or None, got {sink!r}")
    if sink.shape != (heads,):
        raise ArgumentError(
            f"{op}: sink must hold a logit for each of the {heads} heads of q, shape ({heads},), "
            f"got {tuple(sink.shape)}"
        )
    return sink
