"""Rows of token ids, as users give documents and rollouts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...core.arrays import Ints
from ..arguments import ArgumentError


def token_rows(op: str, name: str, given: Iterable[Any]) -> list[Ints]:
    """Each row as int64[tokens], of tensors on the host, arrays or lists of integers.

    Raises:
        ArgumentError: ``given`` is no list of rows, or one of them is not a row of integers.
    """
    return [_row(f"{op}: {name}[{n}]", row) for n, row in enumerate(each_of(op, name, given))]


def each_of(op: str, name: str, given: Iterable[Any]) -> list[Any]:
    """The items of ``given``, as a list.

    Raises:
        ArgumentError: ``given`` cannot be iterated over.
    """
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{op}: {name} must be a list of {name}, got {reprlib.repr(given)}")
    return list(given)


def _row(where: str, given: Any) -> Ints:
    what = f"{where} must be a row of integers"
    if isinstance(given, Mapping):
        names = ", ".join(map(repr, given))
        raise ArgumentError(f"{what}, got a dict with {names}; give its token ids alone")
    try:
        row = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of rows; a tensor on a device
        raise ArgumentError(f"{what} on the host, got {reprlib.repr(given)}") from error
    if row.ndim != 1 or not (np.issubdtype(row.dtype, np.integer) or len(row) == 0):
        got = f"{row.dtype} {row.shape}" if row.ndim else "a number; a batch is a list of rows"
        raise ArgumentError(f"{what}, got {got}")
    return row.astype(np.int64)
