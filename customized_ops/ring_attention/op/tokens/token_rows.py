"""Rows of token ids, as users give documents and rollouts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...core.arrays import Ints
from ..arguments import ArgumentError

IDS, BESIDE_IDS = "input_ids", ("labels", "attention_mask")
IGNORED = -100  # the label of tokens that are no targets


def token_rows(op: str, name: str, given: Iterable[Any]) -> list[Ints]:
    """Each row as int64[tokens], of tensors on the host, arrays or lists of integers.

    Raises:
        ArgumentError: ``given`` is no list of rows, or one of them is not a row of integers.
    """
    return [_row(f"{op}: {name}[{n}]", row) for n, row in enumerate(each_of(op, name, given))]


def labelled_rows(op: str, name: str, given: Iterable[Any]) -> tuple[list[Ints], list[Ints]]:
    """The ids of each row, and its labels, int64[tokens] each.

    Args:
        given: rows as :func:`token_rows` takes them, whose labels are the ids; or dicts, as
            tokenizers and datasets give them, with ``input_ids``, and perhaps ``labels`` and an
            ``attention_mask`` of ones.
    Raises:
        ArgumentError: as :func:`token_rows`; or a dict has other entries, ones of other lengths, or
            labels that are neither the ids nor -100.
    """
    rows, labels = [], []
    for n, each in enumerate(each_of(op, name, given)):
        where = f"{op}: {name}[{n}]"
        entries = each if isinstance(each, Mapping) else {IDS: each}
        if IDS not in entries or not entries.keys() <= {IDS, *BESIDE_IDS}:
            has, others = ", ".join(map(repr, entries)) or "nothing", " and ".join(BESIDE_IDS)
            raise ArgumentError(f"{where} has {has}; give {IDS}, and perhaps {others}")
        row = _row(where if entries is not each else f"{where}['{IDS}']", entries[IDS])
        label, attended = (
            _beside(f"{where}['{key}']", entries.get(key), row) for key in BESIDE_IDS
        )
        if attended is not None and not (attended == 1).all():
            raise ArgumentError(f"{where}['attention_mask'] must be ones: leave padding out")
        if label is not None and (other := (label != row) & (label != IGNORED)).any():
            at = int(other.argmax())
            raise ArgumentError(
                f"{where}['labels'] must be the ids again, or {IGNORED}; they are shifted here, "
                f"and no others are supported: token {at} is {row[at]}, its label {label[at]}"
            )
        rows.append(row)
        labels.append(row if label is None else label)
    return rows, labels


def _beside(where: str, given: Any, row: Ints) -> Ints | None:
    if given is None:
        return None
    found = _row(where, given)
    if len(found) != len(row):
        raise ArgumentError(f"{where} has {len(found)} entries for {len(row)} tokens")
    return found


def each_of(op: str, name: str, given: Iterable[Any]) -> list[Any]:
    """The items of ``given``, as a list.

    Raises:
        ArgumentError: ``given`` cannot be iterated over, or is a dict.
    """
    if isinstance(given, Mapping):
        keys = ", ".join(map(repr, given))
        raise ArgumentError(f"{op}: {name} must be a list of {name}, got a dict with {keys}")
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
