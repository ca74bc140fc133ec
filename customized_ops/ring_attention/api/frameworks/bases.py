"""Checks of mixins that must go before a framework's own class in a class's bases."""

from __future__ import annotations


def require_first(cls: type, ours: type, hook: str) -> None:
    """Raise TypeError if a base that has the method ``hook`` goes before ``ours``."""
    for base in cls.__mro__[: cls.__mro__.index(ours)]:
        if hook in vars(base) and not issubclass(base, ours):
            raise TypeError(
                f"{cls.__name__}: {base.__name__} goes before {ours.__name__}, whose methods "
                f"are then not called; write class {cls.__name__}({ours.__name__}, ...)"
            )
