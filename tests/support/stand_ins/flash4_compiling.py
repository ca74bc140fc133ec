"""The stand-in for flash-attn-4, whose functions make their results and have kernels of their own
write them, in a way that torch does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flash4_library import Library, install
from torch.utils._python_dispatch import _disable_current_modes

from customized_ops.ring_attention.core.kernels.adapters import flash4
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import flash4_library
from customized_ops.ring_attention.core.run.replays import replay, seen_before

TABLES = "cu_seqlens_q", "cu_seqlens_k"
OPERANDS = "q", "k", "v", "out", "dout", "lse", "dlse"


class Cache:
    """As the library's."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel


class Compiling(Library):
    """Counts calls of its functions, and launches of its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.launched = 0, 0
        self.compile_cache, self.cache_of_backward = Cache(), Cache()

    def forward(self, **given: Any) -> tuple[Any, ...]:
        self.called += 1
        interface: Any = flash4_library.interface()
        q, v = given["q"], given["v"]
        out, lse = given.pop("out", None), given.pop("lse", None)
        if out is None:
            out = interface.torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        if made_zero := lse is None:
            lse = interface.torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=q.dtype)
        operands, rest = _sorted(given, ("q", "k", "v", *TABLES))
        kernel = _kernel(interface._flash_attn_fwd.compile_cache, self._write_results)
        kernel(out.detach(), lse, made_zero, *operands, rest)
        return out, lse, None, None, None

    def _write_results(self, out: Any, lse: Any, adds: bool, *given: Any) -> None:
        made = self._made(Library.forward, ("q", "k", "v", *TABLES), given)
        _write(out, made[0])
        _write(lse, made[1], adds=adds)  # to what the function made zero

    def backward(self, **given: Any) -> tuple[Any, ...]:
        self.called += 1
        interface: Any = flash4_library.interface()
        places = [given.pop(name, None) for name in ("dq", "dk", "dv")]
        grads = [
            interface.torch.empty_like(given[name]) if place is None else place
            for name, place in zip("qkv", places, strict=True)
        ]
        operands, rest = _sorted(given, (*OPERANDS, *TABLES))
        kernel = _kernel(interface._flash_attn_bwd.compile_cache, self._write_grads)
        kernel(*grads, *operands, rest)
        return tuple(grads)

    def _write_grads(self, dq: Any, dk: Any, dv: Any, *given: Any) -> None:
        made = self._made(Library.backward, (*OPERANDS, *TABLES), given)
        for place, values in zip((dq, dk, dv), made, strict=True):
            _write(place, values)

    def _made(self, function: Any, names: tuple[str, ...], given: Any) -> Any:
        self.launched += 1
        *operands, rest = given
        with _disable_current_modes():
            return function(self, **dict(zip(names, operands, strict=True)), **dict(rest))


def _write(place: Any, values: Any, *, adds: bool = False) -> None:
    with _disable_current_modes():
        place.numpy()[...] = values.numpy() + (place.numpy() if adds else 0)


def _sorted(given: dict[str, Any], names: tuple[str, ...]) -> tuple[list[Any], Any]:
    """Those of these names, as views; and the others, which a kernel is given in a tuple, as the
    library gives it block lists."""
    found = [(name, given.get(name)) for name in names]
    operands = [t if t is None or name in TABLES else t.detach() for name, t in found]
    return operands, tuple((name, value) for name, value in given.items() if name not in names)


def _kernel(cache: Cache, kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel as the library finds it, which compiles it in its first call."""
    if "kernel" not in cache:
        cache["kernel"] = kernel
    found: Callable[..., None] = cache["kernel"]
    return found


def install_compiling(monkeypatch: pytest.MonkeyPatch, seen: int) -> Compiling:
    """Put it where the library would be; calls are recorded after ``seen`` of them."""
    made = Compiling()
    interface: Any = install(monkeypatch, made)
    interface._flash_attn_fwd.compile_cache = made.compile_cache
    interface._flash_attn_bwd.compile_cache = made.cache_of_backward
    monkeypatch.setattr(flash4, "unproven_tapes", lambda: None)
    monkeypatch.setattr(replay, "_checked", {})
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", seen)
    for name in ("_of_pairs", "_call_kinds", "_of_plans"):
        monkeypatch.setattr(replay, name, getattr(replay, name))  # put back later
    forget()
    return made


def forget() -> None:
    """All calls that came before."""
    replay._of_pairs, replay._of_plans = seen_before.SeenBefore(), seen_before.SeenBefore()
    replay._call_kinds = seen_before.Kinds()
