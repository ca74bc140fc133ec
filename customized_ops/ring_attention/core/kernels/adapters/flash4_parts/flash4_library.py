"""flash-attn-4's functions, and the kernels that they compile and launch."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from ....tape import allocate, copied, launch_kernel

COMPARED = ("4.0.0b36",)  # versions whose tapes were compared with their calls on GPUs


@cache  # an import statement in each call would cost microseconds
def interface() -> ModuleType:
    """The library's functions."""
    return importlib.import_module("flash_attn.cute.interface")


def compiled() -> int:
    """How many kernels the library has compiled, each kind in the cache of its function."""
    return sum(len(function.compile_cache.cache) for function in _compiling(interface()))


@cache
def _compiling(library: ModuleType) -> list[Any]:
    """The functions that have a cache of kernels."""
    return [f for f in vars(library).values() if hasattr(f, "compile_cache")]


def unproven_tapes() -> str | None:
    """Why it is not known what the library launches, or None if it is."""
    try:
        found = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        found = "of an unknown version"
    if found in COMPARED:
        return None
    return f"tapes of flash-attn-4 {found} were not compared, those of {', '.join(COMPARED)} were"


_lock = threading.Lock()
_watching = 0
# While there are threads that watch: the functions, and what was in their module by name.
_watched: list[Any] = []
_replaced: dict[str, Any] = {}
# The functions of torch by which the library makes tensors.
ALLOCATING = "empty", "empty_like", "zeros", "zeros_like"
COPYING = "maybe_contiguous"  # the library's own, which copies


@contextmanager
def watched() -> Iterator[None]:
    """Inside this context, what the library's functions make and launch is seen where they are
    called by :func:`..tape.call_library`. (Most of what they do is to choose a kernel by some sixty
    properties of their arguments.)"""
    global _watching
    library = interface()
    seen = _seen_functions(library)
    with _lock:
        if _watching == 0:
            for function in _compiling(library):
                function.compile_cache = _Watched(function.compile_cache)
                _watched.append(function)
            for name, of_ours in seen.items():
                _replaced[name] = getattr(library, name)
                setattr(library, name, of_ours)
        _watching += 1
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            while _watched and not _watching:
                function = _watched.pop()
                if isinstance(function.compile_cache, _Watched):  # not replaced meanwhile
                    function.compile_cache = function.compile_cache.whole
            while _replaced and not _watching:
                name, whole = _replaced.popitem()
                if getattr(library, name) is seen[name]:
                    setattr(library, name, whole)


@cache
def _seen_functions(library: ModuleType) -> dict[str, Any]:
    """What stands in the library's module, by name, for what makes tensors there: torch, and a
    function that copies operands which are not aligned. What the module lacks is not seen."""
    module = ModuleType("torch")
    vars(module).update(vars(torch))
    vars(module).update({n: partial(allocate, getattr(torch, n)) for n in ALLOCATING})
    known = vars(library)
    seen = {"torch": module} if "torch" in known else {}
    return seen | ({COPYING: partial(copied, known[COPYING])} if COPYING in known else {})


class _Watched:
    """A cache whose kernels are launched by :func:`..tape.launch_kernel`."""

    def __init__(self, whole: Any) -> None:
        self.whole, self.cache = whole, whole.cache

    def __contains__(self, key: Any) -> bool:
        return key in self.whole

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.whole[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        return partial(launch_kernel, self.whole[key])
