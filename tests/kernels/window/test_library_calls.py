"""What calls of a library are made of, and which of them are launched alike."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.kernels import Pairs
from customized_ops.ring_attention.core.kernels.window import library_calls
from customized_ops.ring_attention.core.kernels.window.library_calls import (
    CallLimits,
    LibraryCall,
    LibraryCalls,
    Packing,
)
from customized_ops.ring_attention.core.mask.slices import UNBOUNDED, as_slices, normalise

LIMITS = CallLimits(least=16, empty=True)


def pairs(*documents: tuple[int, int, int, int], rows: int = 0, keys: int = 0) -> Pairs:
    """Causal documents: first row, last row + 1, first key, last key + 1."""
    slices = normalise(as_slices([(*d, -UNBOUNDED, d[3] - d[1]) for d in documents]))
    return Pairs(slices, rows or documents[-1][1], keys or documents[-1][3])


def made(of: Pairs, batch: int = 1, *, flat: bool = True) -> LibraryCalls:
    """Calls over rows that are end to end in memory, or are some of more rows."""
    rows = torch.empty(batch, of.q_len + (not flat), 1, 8)[:, : of.q_len]
    return LibraryCalls.of(of, (rows, torch.empty(batch, of.k_len, 1, 8)), LIMITS)


def test_calls_of_one_kind_are_equal_in_all_but_what_tables_hold() -> None:
    table, longer = torch.zeros(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    packing = Packing(table, table, 5, 6)
    call = LibraryCall((-1, 0), packing)
    other: dict[str, Any] = {
        "window": (3, 0),
        "packing": None,
        "number": 1,
        "entries": 2,
        "entry": 1,
        "rows": (0, 2),
        "keys": (0, 2),
        "skips_rows": True,
    }
    assert other.keys() == {f.name for f in fields(LibraryCall)}
    others = [replace(call, **{name: value}) for name, value in other.items()]
    packings = [
        Packing(longer, longer, 5, 6),
        Packing(table, table, 4, 6),
        Packing(table, table, 5, 7),
    ]
    others += [replace(call, packing=each) for each in packings]
    kinds = [each.kind for each in (call, *others)]
    assert len(set(kinds)) == len(kinds)
    same = replace(call, packing=Packing(table + 1, table + 2, 5, 6))
    assert same.kind == call.kind


@pytest.mark.parametrize("extra", [0, 3])
def test_a_packed_call_of_one_entry_has_all_keys(extra: int) -> None:
    first = 4 + extra
    one = made(pairs((0, 9, first, first + 9), (9, 20, first + 9, first + 20), keys=27 + extra))
    other = made(pairs((0, 5, 1, 6), (5, 20, 6, 21), keys=27 + extra))
    assert one.kind == other.kind and one.keys.whole and one.calls[0].keys is None


def test_one_long_segment_is_not_packed() -> None:
    (call,) = made(pairs((0, 20, 4, 24), keys=30)).calls
    assert call.packing is None and call.keys == (4, 20)
    few = normalise(as_slices([(0, 20, 4, 10, -UNBOUNDED, UNBOUNDED)]))
    (call,) = made(Pairs(few, 20, 30)).calls  # few keys, but many with those around
    assert call.packing is not None and call.keys is None
    assert call.packing.cu_seqlens_k.tolist()[:2] == [0, 4]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("rows", [9, 20])
def test_several_entries_are_one_call_where_they_can_be(rows: int, flat: bool) -> None:
    of = pairs((0, rows, 4, rows + 4), keys=30)
    (call,) = made(of, batch=3, flat=flat).calls
    assert call.entries == 3 and call.packing is None and call.keys == (4, rows)


def test_calls_that_were_prepared_are_the_same() -> None:
    """Whichever library they were prepared for first."""
    given = (0, 9, 4, 13), (9, 20, 13, 24)
    found = []
    for prepared in ((), (library_calls.UNLIMITED, LIMITS), (LIMITS, library_calls.UNLIMITED)):
        of = pairs(*given, keys=30)
        for limits in prepared:
            library_calls.prepare(of, limits)
        todo = made(of)
        found.append((todo.kind, todo.rows, todo.keys))
    assert found[0] == found[1] == found[2]
