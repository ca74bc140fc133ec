"""The options of every attention function: as users pass them, and as ops in a graph hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.merge.merge import accumulation_dtype
from .arguments import BY_NAME, ArgumentError, flag_of, is_integer, require
from .tokens.call_layouts import BALANCED_NAME


class SharedOptions(TypedDict, total=False):
    """What every attention function takes by keyword; :data:`.documentation.ARGUMENTS` says what
    each means."""

    softcap: float
    sink: Tensor | None
    dropout_seed: int | Tensor | None
    layout: Layout | str | None
    kernel: str
    reduce_dtype: torch.dtype | None
    q_rows: tuple[int, int] | None
    q_heads: tuple[int, int] | None


class Options(NamedTuple):
    """The options of one call as the user passed them, not yet checked: first those that functions
    name themselves, then :class:`SharedOptions`."""

    alibi_slopes: Tensor | None = None
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    team_size: int | None = None
    k_layout: Layout | None = None
    use_cute: bool = False
    softcap: float = 0.0
    layout: Layout | str | None = None
    kernel: str = "auto"
    reduce_dtype: torch.dtype | None = None
    q_rows: tuple[int, int] | None = None
    q_heads: tuple[int, int] | None = None
    sink: Tensor | None = None
    dropout_seed: int | Tensor | None = None

    def tensors(self, op: str, q: Tensor) -> dict[str, Tensor | None]:
        """The optional tensors of the op; a seed that is None is drawn from torch's generator."""
        heads = q.shape[-2]
        return {
            "alibi_slopes": _slopes(op, self.alibi_slopes, heads),
            "sink": _sink(op, self.sink, heads),
            "dropout_seed": _seed(op, self.dropout_seed, _dropout(op, self.dropout_p), q),
        }

    def parts(self, op: str, q: Tensor) -> dict[str, Any]:
        """The numbers of the op on which its annotation depends."""
        row_part, row_parts = _part(op, "q_rows", self.q_rows)
        head_part, head_parts = _part(op, "q_heads", self.q_heads)
        return {
            "dropout_p": _dropout(op, self.dropout_p),
            "row_part": row_part,
            "row_parts": row_parts,
            "head_part": head_part,
            "head_parts": head_parts,
            "head_total": head_parts * int(q.shape[-2]) if head_parts and q.ndim > 1 else 0,
        }

    def layouts(self, op: str) -> dict[str, Any]:
        """The layouts as text."""
        return {name: _spec(op, name, getattr(self, name)) for name in LAYOUTS}

    def checked(self, op: str, q: Tensor) -> OpOptions:
        """All numbers of the op."""
        deterministic = flag_of(op, "deterministic", self.deterministic)
        return OpOptions(
            **self.parts(op, q),
            softmax_scale=_scale(op, self.softmax_scale, q),
            softcap=softcap_of(op, self.softcap),
            return_lse=flag_of(op, "return_lse", self.return_lse),
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
            reduce_dtype=reduce_dtype_of(op, self.reduce_dtype, q),
            kernel=_kernel(op, self.kernel, self.use_cute),
            **self.layouts(op),
            team_size=_team_size(op, self.team_size),
        )


class OpOptions(NamedTuple):
    """The options of one call as its op in a graph holds them: numbers and text, all valid.

    Attributes:
        layout, k_layout: the text of a layout; ``""`` where none was given.
        team_size: 0 where the plan chooses.
        row_part, row_parts: q is part ``row_part`` of ``row_parts`` of its rows; 0 parts: all rows.
        head_part, head_parts, head_total: the same for its heads, ``head_total`` in all.
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


LAYOUTS = ("layout", "k_layout")
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


# Read once: nnscaler's tracer puts stand-ins for int and float where a function looks them up.
_NUMBERS = (int, float, np.integer, np.floating)


def _number(
    op: str, name: str, value: Any, fits: Callable[[float], bool], what: str, kind: str = "a number"
) -> float:
    numeric = isinstance(value, _NUMBERS)
    require(numeric and not isinstance(value, bool), op, name, kind, value)
    require(fits(float(value)), op, name, what, value)
    return float(value)


def _scale(op: str, scale: float | None, q: Tensor) -> float:
    if scale is not None:
        return _number(op, "softmax_scale", scale, math.isfinite, "finite", "a number or None")
    if q.shape[-1] == 0:
        raise ArgumentError(
            f"{op}: softmax_scale must be given where the head dim of q is 0, got None for "
            f"q of shape {tuple(q.shape)}"
        )
    return float(q.shape[-1] ** -0.5)


def softcap_of(op: str, softcap: float) -> float:
    """The cap of scores, 0 for none."""
    return _number(op, "softcap", softcap, lambda x: 0 <= x < math.inf, "0 (none) or above")


def _dropout(op: str, dropout_p: float) -> float:
    expected = "in [0, 1)"
    if isinstance(dropout_p, int) and dropout_p > 1:
        expected += f" {BY_NAME}"
    return _number(op, "dropout_p", dropout_p, lambda x: 0 <= x < 1, expected)


def _spec(op: str, name: str, layout: Layout | str | None) -> str:
    expected = "a Layout or None" if name != "layout" else f"a Layout, {BALANCED_NAME!r} or None"
    if isinstance(layout, str):  # first: torch.compile compares no Layout with a text
        fits = name == "layout" and layout == BALANCED_NAME
        require(fits, op, name, expected, layout)
        return layout
    require(layout is None or isinstance(layout, Layout), op, name, expected, layout)
    return "" if layout is None else layout.spec


def _team_size(op: str, team_size: int | None) -> int:
    fits = team_size is None or is_integer(team_size, 1)
    require(fits, op, "team_size", "a number of ranks, 1 or more, or None", team_size)
    return int(team_size or 0)


def reduce_dtype_of(op: str, dtype: torch.dtype | None, q: Tensor) -> str:
    """The dtype that gradients travel in, as an op argument: ``""`` for None."""
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
    require(isinstance(kernel, str), op, "kernel", "the name of one, or 'auto'", kernel)
    if not flag_of(op, "use_cute", use_cute):
        return kernel
    if kernel not in ("auto", "flash4"):
        raise ArgumentError(
            f"{op}: use_cute=True asks for kernel 'flash4', but kernel is {kernel!r}; give one"
        )
    return "flash4"


def _part(op: str, name: str, part: tuple[int, int] | None) -> tuple[int, int]:
    """``q_rows`` or ``q_heads`` as (part, parts); (0, 0) if None."""
    if part is None:
        return 0, 0
    pair = tuple(part) if isinstance(part, Sequence) else ()
    fits = len(pair) == 2 and all(map(is_integer, pair)) and pair[0] < pair[1]
    require(fits, op, name, "(i, n) for part i of n, 0 <= i < n, or None", part)
    return int(pair[0]), int(pair[1])


def _seed(op: str, seed: int | Tensor | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """int64[1], drawn on q's device if None; None without dropout, which needs no seed."""
    if isinstance(seed, Tensor):
        fits = seed.dtype == torch.int64 and seed.numel() == 1
    else:
        fits = seed is None or is_integer(seed, -(2**63))
    require(fits, op, "dropout_seed", "an int, an int64 tensor of one element or None", seed)
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    return seed.reshape(1) if isinstance(seed, Tensor) else torch.tensor([int(seed)])


def _slopes(op: str, slopes: Tensor | None, heads: int) -> Tensor | None:
    """[h] or [b, h]; the batch is checked against the annotation."""
    if slopes is None:
        return None
    floating = isinstance(slopes, Tensor) and slopes.dtype.is_floating_point
    require(floating, op, "alibi_slopes", "a floating tensor", slopes)
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
    floating = isinstance(sink, Tensor) and sink.dtype.is_floating_point
    require(floating, op, "sink", "a floating tensor [h] or None", sink)
    if sink.shape != (heads,):
        raise ArgumentError(
            f"{op}: sink must hold a logit for each of the {heads} heads of q, shape ({heads},), "
            f"got {tuple(sink.shape)}"
        )
    return sink
