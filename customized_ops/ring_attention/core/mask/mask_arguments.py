"""What the mask constructors accept. Every function here raises MaskError for anything else, and
names the argument."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Ints
from .slices import UNBOUNDED

LARGEST_INT = int(np.iinfo(np.int64).max)


class MaskError(ValueError):
    """An impossible mask: bad arguments, slices out of range, or a pair covered twice."""


def shown(value: object) -> str:
    """``value`` in an error, kept short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def integer(name: str, value: object, least: int) -> int:
    """``value``, a Python or numpy integer of at least ``least``, as an int."""
    try:
        number = _index(value)
    except TypeError:
        raise MaskError(f"{name} must be an integer, got {shown(value)}") from None
    if number < least:
        raise MaskError(f"{name} must be at least {least}, got {number}")
    return number


def _index(value: object) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]


def count(name: str, value: object, least: int = 0) -> int:
    """``value`` tokens or blocks: at least ``least``, and below what slices take for no bound."""
    number = integer(name, value, least)
    if number >= UNBOUNDED:
        raise MaskError(f"{name} must be below 2**40, got {number}")
    return number


def flag(name: str, value: object) -> bool:
    """``value``, a bool or 0 or 1, as a bool."""
    if not isinstance(value, (bool, int, np.bool_, np.integer)) or value not in (0, 1):
        raise MaskError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def reach(name: str, value: object) -> int:
    """``value`` tokens or blocks, with -1 as UNBOUNDED."""
    number = integer(name, value, least=-1)
    return UNBOUNDED if number < 0 else min(number, UNBOUNDED)


def window_reach(window: object) -> tuple[int, int]:
    """``window`` as the (left, right) reach in tokens."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise MaskError(f"window must be (left, right), -1 for no bound, got {shown(window)}")
    return reach("window[0]", window[0]), reach("window[1]", window[1])


def integers(name: str, values: object, width: int | None = None) -> Ints:
    """``values`` as int64[n], or as int64[n, width]; nothing at all is n = 0. Floats and bools are
    refused; the first entry of a list that does not fit is named."""
    if isinstance(values, Sequence):
        if width is None and set(map(type, values)) == {int}:  # the usual case, and the fastest
            array = np.asarray(values)
            if array.dtype == np.int64:
                return array
        _require_entries(name, values, width)
    wanted = "a sequence of integers" if width is None else f"rows of {width} integers"
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # a tensor on a device or with a gradient
        raise MaskError(f"{name} must be {wanted}, got {shown(values)}") from None
    if array.size == 0 and array.ndim in (1, 2):
        array = np.zeros(0 if width is None else (0, width), dtype=np.int64)
    fits = array.ndim == 1 if width is None else array.ndim == 2 and array.shape[1] == width
    if array.dtype.kind not in "iu" or not fits:
        typed = f"{array.dtype} of shape {array.shape}"
        got = typed if hasattr(values, "dtype") else shown(values)
        raise MaskError(f"{name} must be {wanted}, got {got}")
    if array.dtype == np.uint64:  # beyond int64: out of every range, or no bound
        array = np.minimum(array, np.uint64(LARGEST_INT))
    return array.astype(np.int64)


def _require_entries(name: str, values: Sequence[Any], width: int | None) -> None:
    """Check entries one by one, because numpy takes a bool among integers for an integer."""
    for n, entry in enumerate(values):
        try:
            numbers = [_index(one) for one in ([entry] if width is None else entry)]
        except TypeError:
            numbers = []
        if (
            len(numbers) != (width or 1)
            or not -LARGEST_INT - 1 <= min(numbers) <= max(numbers) <= LARGEST_INT
        ):
            wanted = "an integer" if width is None else f"{width} integers"
            raise MaskError(f"{name}[{n}] must be {wanted} of 64 bits, got {shown(entry)}")


def not_negative(name: str, values: Ints) -> Ints:
    """``values``, tokens or blocks, of which none may be below 0."""
    for at in np.flatnonzero(values < 0).tolist():
        raise MaskError(f"{name}[{at}] must be at least 0, got {values[at]}")
    return values


def cumulative(name: str, values: object) -> Ints:
    """Cumulative lengths int64[documents + 1], from 0 and never falling."""
    lengths = integers(name, values)
    if len(lengths) == 0:
        raise MaskError(f"{name} must be cumulative lengths, the first of them 0, got none")
    if lengths[0] != 0:
        raise MaskError(f"{name} must start at 0, got {name}[0] = {lengths[0]}")
    falls = lengths[1:] < lengths[:-1]
    if falls.any():
        n = int(falls.argmax())
        raise MaskError(
            f"{name}[{n + 1}] = {lengths[n + 1]} is below {name}[{n}] = {lengths[n]}; cumulative "
            "lengths never fall"
        )
    count(f"{name}[{len(lengths) - 1}]", lengths[-1])
    return lengths


def ranges(name: str, values: object, length: int | None) -> Ints:
    """Token ranges (start, stop) inside ``length`` tokens, if given, as int64[n, 2]."""
    pairs = integers(name, values, width=2)
    bad = (pairs[:, 0] < 0) | (pairs[:, 0] > pairs[:, 1])
    if length is not None:
        bad |= pairs[:, 1] > length
    if bad.any():
        n, end = int(bad.argmax()), "" if length is None else f" <= {length}"
        raise MaskError(
            f"{name}[{n}] must be (start, stop) with 0 <= start <= stop{end}, "
            f"got {tuple(pairs[n].tolist())}"
        )
    return pairs


def one_range(name: str, value: object, length: int) -> tuple[int, int]:
    """A token range inside ``length`` tokens; None is all of them."""
    if value is None:
        return 0, length
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise MaskError(f"{name} must be (start, stop) or None, got {shown(value)}")
    start, stop = count(f"{name}[0]", value[0]), count(f"{name}[1]", value[1])
    if not start <= stop <= length:
        raise MaskError(
            f"{name} must be (start, stop) with start <= stop <= {length}, got {(start, stop)}"
        )
    return start, stop
