"""Importing an engine as soon as a program has imported what it works with."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_asked: set[tuple[str, str]] = set()


def import_with(package: str, engine: str) -> None:
    """Import ``engine`` now if ``package`` is imported already, else right after it is.

    A failure is a warning: a program that imports both need not use them together.
    """
    if (package, engine) in _asked:
        return
    _asked.add((package, engine))
    if package in sys.modules:
        _import(package, engine)
    else:
        sys.meta_path.insert(0, _AfterImport(package, engine))


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
    """A finder of the import system, for one package. It finds what the other finders find, and has
    the engine imported once the package has run."""

    def __init__(self, package: str, engine: str) -> None:
        self._package, self._engine = package, engine

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

            def run_and_import(module: ModuleType) -> None:
                run(module)
                _import(self._package, self._engine)

            loader.exec_module = run_and_import
        return spec
