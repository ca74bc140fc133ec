"""Which arguments the functions of an installed library take. They change from version to version,
so a kernel passes every argument by name, and checks them before it declares itself able."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any


@cache
def required(function: Callable[..., Any]) -> dict[str, bool]:
    """The parameters of a function or a ``torch.library`` op, and whether each has no default."""
    schema = getattr(getattr(function, "_opoverload", None), "_schema", None)
    if schema is not None:
        return {a.name: not a.has_default_value() for a in schema.arguments}
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters}


def lacking(function: Callable[..., Any], needed: Iterable[str]) -> list[str]:
    """The arguments in ``needed`` that ``function`` does not take."""
    return [name for name in needed if name not in required(function)]


def unusable(
    package: str, name: str, load: Callable[[], Callable[..., Any]], needed: Iterable[str]
) -> str | None:
    """Why the function ``name`` of a package cannot be called: the package cannot be imported, or
    the function does not take all that is ``needed``; None if it can."""
    try:
        lacks = lacking(load(), needed)
    except Exception as error:  # a broken install raises anything
        return f"{package} cannot be imported ({type(error).__name__}: {error})"
    return f"{name} of {package} does not take {', '.join(lacks)}" if lacks else None


def call_by_name(function: Callable[..., Any], **given: Any) -> Any:
    """Call ``function`` by keyword; parameters without a default that are not given are None."""
    rest = {name: None for name, must in required(function).items() if must and name not in given}
    return function(**rest, **given)
