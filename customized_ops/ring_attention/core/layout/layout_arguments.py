"""The arguments that layouts are made from: how they are checked, and their form as text.

Ops in a graph take numbers and strings, so a layout travels through it as short text, its spec, in
one of FORMS. ``sizes`` are tokens per rank, ``chunks`` ends with the rank of each chunk, and
``ranges`` gives the start-stop pairs of each rank, with ``;`` between ranks. Zigzag may end with
cumulative lengths of documents. Each error names the method and its argument.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from ..arrays import Ints
from ..mask import AttnMask, mask_arguments

FORMS = {
    "contiguous": "contiguous:TOTAL:RANKS",
    "zigzag": "zigzag:TOTAL:RANKS or zigzag:TOTAL:RANKS:CU_SEQLENS",
    "striped": "striped:TOTAL:RANKS:BLOCK",
    "sizes": "sizes:SIZE,SIZE,...",
    "chunks": "chunks:TOTAL:RANKS:CHUNK:RANK,RANK,...",
    "ranges": "ranges:START-STOP,START-STOP,...;START-STOP,...",
}


class LayoutError(ValueError):
    """A layout that cannot exist, or one that contradicts what it is used with."""


def shorten(text: str, length: int = 60) -> str:
    """``text``, with its end replaced by an ellipsis if it is longer than ``length``."""
    return text if len(text) <= length else text[: length - 3] + "..."


def lengths(maker: str, total: int, group_size: int) -> tuple[int, int]:
    """``total`` (0 or more) and ``group_size`` (1 or more) of the method ``maker``, checked."""
    return (
        whole(f"Layout.{maker}: total", total, 0),
        whole(f"Layout.{maker}: group_size", group_size, 1),
    )


def whole(what: str, value: int, least: int) -> int:
    """``value`` as an int, which must be ``least`` or more; ``what`` names it in errors."""
    if not hasattr(value, "__index__") or operator.index(value) < least:
        raise LayoutError(f"{what} must be an integer of at least {least}, got {value!r}")
    return operator.index(value)


def integers(values: object, width: int | None = None) -> Ints | None:
    """``values`` as int64[n] or int64[n, width], or None if they are something else."""
    try:
        return mask_arguments.integers("", values, width)
    except mask_arguments.MaskError:
        return None


def cumulative(cu_seqlens: object, total: int) -> Ints:
    """``cu_seqlens`` of :meth:`Layout.zigzag` as an array, checked."""
    name = "cu_seqlens"
    starts = integers(cu_seqlens)
    if starts is None or len(starts) == 0 or (starts[0], starts[-1]) != (0, total):
        raise LayoutError(
            f"Layout.zigzag: {name} must be integers from 0 to total, {total}, "
            f"got {shorten(str(cu_seqlens))}"
        )
    for before in np.flatnonzero(np.diff(starts) < 0).tolist():
        raise LayoutError(
            f"Layout.zigzag: {name}[{before + 1}] = {starts[before + 1]} is below "
            f"{name}[{before}] = {starts[before]}; cumulative lengths never fall"
        )
    return starts


def weighted_masks(mask: object) -> list[tuple[AttnMask, float]]:
    """``mask`` of :meth:`Layout.balanced` as pairs, checked."""
    pairs: Any = [(mask, 1)] if isinstance(mask, AttnMask) else mask
    try:
        weighted = [(each, float(weight)) for each, weight in pairs]
    except (TypeError, ValueError):
        weighted = []
    if not weighted or not all(isinstance(each, AttnMask) for each, _ in weighted):
        raise LayoutError(
            "Layout.balanced: mask must be an AttnMask or pairs (AttnMask, weight), "
            f"got {shorten(str(mask))}"
        )
    for each, weight in weighted:
        if not 0 < weight < float("inf"):
            raise LayoutError(f"Layout.balanced: weights must be positive, got {weight}")
        if not each.q_len == each.k_len == weighted[0][0].q_len:
            raise LayoutError(
                "Layout.balanced: mask must be of self-attention, masks of one length, got "
                + ", ".join(f"{m.q_len} x {m.k_len}" for m, _ in weighted)
            )
    return weighted


def write(kind: str, *fields: int | Iterable[int]) -> str:
    """``write("striped", 8, 2, 1)`` is "striped:8:2:1"; a sequence becomes a comma list."""
    texts = [",".join(map(str, f)) if isinstance(f, Iterable) else str(f) for f in fields]
    return ":".join([kind, *texts])


def write_ranges(table: Ints, group_size: int) -> str:
    """The spec of any layout, made from its table."""
    texts = [f"{start}-{stop}" for start, stop in table[:, 1:].tolist()]
    ends = table[:, 0].searchsorted(np.arange(group_size + 1)).tolist()
    return "ranges:" + ";".join(",".join(texts[a:b]) for a, b in pairwise(ends))


def read(spec: str) -> tuple[str, list[Any]]:
    """Which static method of ``Layout`` makes the layout of ``spec``, and with which arguments.

    Raises:
        LayoutError: the kind is unknown (names those known), or the fields do not fit the kind.
    """
    kind, _, rest = spec.partition(":")
    if kind not in FORMS:
        raise LayoutError(f"unknown layout {shorten(spec)!r}; known: {', '.join(FORMS)}")
    try:
        return _read_fields(kind, rest)
    except ValueError:
        raise LayoutError(
            f"{shorten(spec)!r} is not the spec of a layout; expected {FORMS[kind]}"
        ) from None


def _read_fields(kind: str, rest: str) -> tuple[str, list[Any]]:
    if kind == "sizes":
        return "from_sizes", [_list(rest)]
    if kind == "ranges":
        return "from_ranges", [[_pairs(own) for own in rest.split(";")]]
    fields = rest.split(":")
    if kind == "chunks":
        total, ranks, chunk, assigned = fields
        return "from_chunks", [int(total), int(ranks), int(chunk), _list(assigned)]
    if kind == "zigzag" and len(fields) == 3:
        return "zigzag", [int(fields[0]), int(fields[1]), _list(fields[2])]
    if len(fields) != (3 if kind == "striped" else 2):
        raise ValueError
    return kind, [int(field) for field in fields]


def _list(text: str) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _pairs(text: str) -> list[tuple[int, int]]:
    pairs = [pair.split("-") for pair in text.split(",")] if text else []
    return [(int(start), int(stop)) for start, stop in pairs]
