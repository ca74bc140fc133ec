"""Runs code as soon as a program has imported a package, not before, as importing takes long."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

COMPILER = "torch._dynamo"
F = TypeVar("F", bound=Callable[..., Any])

_asked: set[tuple[str, str]] = set()
_waiting: dict[str, list[Callable[[], Any]]] = {}  # by package


def import_with(package: str, engine: str) -> None:
    """Import ``engine`` now if ``package`` is imported already, else right after it is.

    A failure is a warning: a program that imports both need not use them together.
    """
    if (package, engine) not in _asked:
        _asked.add((package, engine))
        call_with(package, partial(_import, package, engine))


def call_with(package: str, function: Callable[[], Any]) -> None:
    """Call a function now if ``package`` is imported already, else right after it is."""
    if package in sys.modules:
        function()
        return
    if package not in _waiting:
        sys.meta_path.insert(0, _AfterImport(package))
    _waiting.setdefault(package, []).append(function)


def constant_when_compiled(function: F) -> F:
    """``torch.compiler.assume_constant_result``, applied once the compiler is imported: it imports
    the compiler itself, which would cost every process a second."""
    call_with(COMPILER, lambda: torch.compiler.assume_constant_result(function))
    return function


def _import(package: str, engine: str) -> None:
    try:
        importlib.import_module(engine)
    except Exception as error:
        warnings.warn(
            f"{package} does not know the functions of this package, and would trace into them: "
            f"import {engine} fails with {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


class _AfterImport:
    """A finder of the import system, for one package. It finds what the other finders find, and
    calls the functions that wait for the package once that has run."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._package:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                for function in _waiting.pop(self._package, []):
                    function()

            loader.exec_module = run_and_call
        return spec
