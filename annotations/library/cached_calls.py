"""Results that are the same for every call with the same key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def cached(known: dict[Any, T], key: Hashable, make: Callable[[], T], most: int = 1024) -> T:
    """``known[key]``, made if it is missing; the oldest of ``most`` entries makes room.

    A key without a hash, such as symbolic sizes, is not cached, nor is a call of ``make`` that
    raises.
    """
    try:
        found = known.get(key)
    except TypeError:
        return make()
    if found is None:
        found = make()
        if len(known) >= most:  # two threads here may both make room
            known.pop(next(iter(known)), None)
        found = known.setdefault(key, found)  # and then get the same value
    return found


_LISTED = frozenset((list, tuple))


def typed_key(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[type, ...]]:
    """A key that keeps 1, 1.0 and True apart, because a check of arguments does. Also inside lists
    and tuples; every other value goes by its own hash."""
    types = tuple(map(type, values))
    if not _LISTED.isdisjoint(types):
        values = [typed_key(x) if type(x) in _LISTED else x for x in values]
    return tuple(values), types
