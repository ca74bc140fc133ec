"""Layouts as short text: how a layout travels through a graph, whose ops take numbers and strings.

    contiguous:TOTAL:RANKS          striped:TOTAL:RANKS:BLOCK       sizes:3,0,5
    zigzag:TOTAL:RANKS              chunks:TOTAL:RANKS:CHUNK:0,1,1,0
    zigzag:TOTAL:RANKS:0,3,8        ranges:0-4,8-12;4-8

``sizes`` are tokens per rank, ``chunks`` ends with the rank of each chunk, and ``ranges`` gives
start-stop for each rank, with ``;`` between ranks. Zigzag may end with cumulative lengths of
documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .layout_arguments import LayoutError, shorten

FORMS = {
    "contiguous": "contiguous:TOTAL:RANKS",
    "zigzag": "zigzag:TOTAL:RANKS or zigzag:TOTAL:RANKS:CU_SEQLENS",
    "striped": "striped:TOTAL:RANKS:BLOCK",
    "sizes": "sizes:SIZE,SIZE,...",
    "chunks": "chunks:TOTAL:RANKS:CHUNK:RANK,RANK,...",
    "ranges": "ranges:START-STOP,START-STOP,...;START-STOP,...",
}


def write(kind: str, *fields: int | Iterable[int]) -> str:
    """``write("striped", 8, 2, 1)`` is "striped:8:2:1"; a sequence becomes a comma list."""
    return ":".join([kind, *(_field(field) for field in fields)])


def write_ranges(ranges: Sequence[Sequence[tuple[int, int]]]) -> str:
    """The spec of any layout."""
    own = (",".join(f"{start}-{stop}" for start, stop in pairs) for pairs in ranges)
    return "ranges:" + ";".join(own)


def read(spec: str) -> tuple[str, list[Any]]:
    """Which static method of ``Layout`` makes the layout of ``spec``, and of what arguments.

    Raises:
        LayoutError: an unknown kind, naming those known; or fields that do not fit the kind.
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


def _field(field: int | Iterable[int]) -> str:
    return ",".join(map(str, field)) if isinstance(field, Iterable) else str(field)


def _list(text: str) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _pairs(text: str) -> list[tuple[int, int]]:
    pairs = [pair.split("-") for pair in text.split(",")] if text else []
    return [(int(start), int(stop)) for start, stop in pairs]
