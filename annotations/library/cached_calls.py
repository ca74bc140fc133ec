"""What was found out once and is true for every call that is alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def remembered(known: dict[Any, T], key: Hashable, make: Callable[[], T], most: int = 1024) -> T:
    """``known[key]``, made if it is not there; the oldest of ``most`` entries makes room.

    A key without a hash, as that of symbolic sizes, is made for each time. What ``make`` raises is
    not remembered.
    """
    try:
        found = known.get(key)
    except TypeError:
        return make()
    if found is None:
        found = make()
        if len(known) >= most:  # threads may meet here, and both make room
            known.pop(next(iter(known)), None)
        found = known.setdefault(key, found)  # and get the same, of which they may keep more
    return found


_LISTED = frozenset((list, tuple))


def alike(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[type, ...]]:
    """A key of values as a check sees them, to which 1, 1.0 and True are not the same. Lists and
    tuples in it are looked into, all else goes by its own hash."""
    types = tuple(map(type, values))
    if not _LISTED.isdisjoint(types):
        values = [alike(x) if type(x) in _LISTED else x for x in values]
    return tuple(values), types
