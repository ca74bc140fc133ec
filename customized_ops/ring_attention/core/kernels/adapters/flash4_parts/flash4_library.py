"""flash-attn-4's functions, and the kernels that they compile and launch."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from ....tape import launch, recording, refuse

COMPARED = ("4.0.0b36",)  # versions whose tapes were compared with their calls on GPUs


@cache  # an import statement in each call would cost microseconds
def interface() -> ModuleType:
    """The library's functions."""
    return importlib.import_module("flash_attn.cute.interface")


def compiled() -> int:
    """How many kernels the library has compiled, each kind in the cache of its function."""
    return sum(len(function.compile_cache.cache) for function in _compiling())


def _compiling() -> list[Any]:
    """The functions that have a cache of kernels."""
    return [f for f in vars(interface()).values() if hasattr(f, "compile_cache")]


def unproven_tapes() -> str | None:
    """Why it is not known what the library launches, or None if it is."""
    try:
        found = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        found = "of an unknown version"
    if found in COMPARED:
        return None
    return f"tapes of flash-attn-4 {found} were not compared, those of {', '.join(COMPARED)} were"


def seen(function: Callable[..., Any], **given: Any) -> Any:
    """Call ``function(**given)`` of the library. If that launches nothing that is watched, the pass
    is not recorded."""
    before = _launched.__dict__.setdefault("count", 0)
    results = function(**given)
    if recording() and _launched.count == before:
        refuse()
    return results


_launched = threading.local()
_lock = threading.Lock()
_watching = 0
_watched: list[Any] = []  # the functions, while there are threads that watch


@contextmanager
def watched() -> Iterator[None]:
    """Inside this context, what the library's functions launch goes through :func:`..tape.launch`.
    (Most of what a function does is to choose a kernel by some sixty properties of its arguments.)
    """
    global _watching
    with _lock:
        _watching += 1
        for function in _compiling() if _watching == 1 else ():
            function.compile_cache = _Watched(function.compile_cache)
            _watched.append(function)
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            while _watched and not _watching:
                function = _watched.pop()
                if isinstance(function.compile_cache, _Watched):  # not replaced meanwhile
                    function.compile_cache = function.compile_cache.whole


class _Watched:
    """A cache whose kernels are launched by :func:`..tape.launch`."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.cache = whole, whole.cache

    def __contains__(self, key: Any) -> bool:
        return key in self.whole

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.whole[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self.whole[key]

        def call(*arguments: Any) -> Any:
            _launched.count = _launched.__dict__.get("count", 0) + 1
            return launch(kernel, *arguments)

        return call
