"""What flash-attn-4 launches is seen, and launched again without its functions."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from flash4_library import Library, install
from torch.utils._python_dispatch import _disable_current_modes

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.kernels import ForwardOperands, Pairs, Scoring
from customized_ops.ring_attention.core.kernels.adapters import flash4, reference
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import flash4_library
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.run import replay

SCORING = Scoring(0.3)
SEEN, CALLS = 2, 5  # calls before one is recorded, and of the test


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
    """The stand-in, whose forward makes its results and has a kernel of its own write them, in a
    way that torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.launched, self.compile_cache = 0, 0, Cache()

    def forward(self, **given: Any) -> tuple[Any, ...]:
        self.called += 1
        q, v = given["q"], given["v"]
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        lse = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=q.dtype)
        cache = flash4_library.interface()._flash_attn_fwd.compile_cache
        if "kernel" not in cache:
            cache["kernel"] = self._kernel
        rest = {name: value for name, value in given.items() if name not in "qkv"}
        cache["kernel"](q.detach(), given["k"], v, out.detach(), lse, rest)
        return out, lse, None, None, None

    def _kernel(self, q: Any, k: Any, v: Any, out: Any, lse: Any, rest: dict[str, Any]) -> None:
        self.launched += 1
        with _disable_current_modes():
            made = Library.forward(self, q=q, k=k, v=v, **rest)
            out.numpy()[...] = made[0].numpy()
            lse.numpy()[...] += made[1].numpy()  # which the function made zero


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    made = Compiling()
    interface: Any = install(monkeypatch, made)
    interface._flash_attn_fwd.compile_cache = made.compile_cache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return made


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_are_launched_without_their_function(
    library: Compiling, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(replay, "SEEN_BEFORE", SEEN)
    ends = [0, 70, 120] if packed else [0, 600]
    mask = AttnMask.varlen(ends, causal=True)
    pairs = Pairs(mask.slices, mask.q_len, mask.k_len)
    for seed in range(CALLS):
        source = torch.Generator().manual_seed(seed)
        shapes = [(1, ends[-1], heads, 8) for heads in (4, 2, 2)]
        tensors = [torch.randn(s, dtype=torch.float64, generator=source) for s in shapes]
        given = ForwardOperands(*tensors)
        got = replay.kernel_forward(flash4, given, pairs, SCORING)
        want = reference.forward(given, pairs, SCORING, None)
        for mine, his in zip(got, want, strict=True):
            torch.testing.assert_close(mine, his, rtol=0, atol=1e-10)
    assert (library.launched, library.called) == (CALLS, SEEN + 1)


def test_the_library_is_left_as_it_was(library: Compiling) -> None:
    interface: ModuleType = flash4_library.interface()
    own = library.compile_cache
    own["a"] = lambda *given: given
    inside = threading.Barrier(2)

    def watch() -> None:
        with flash4_library.watched():
            inside.wait(10)
            inside.wait(10)

    other = threading.Thread(target=watch)
    other.start()
    inside.wait(10)
    with flash4_library.watched():
        seen = interface._flash_attn_fwd.compile_cache
        seen["b"] = own["a"]
        assert "b" in own and "c" not in seen and seen["a"](1, 2) == (1, 2)
        assert flash4_library.compiled() == len(own.cache) == 2
    assert interface._flash_attn_fwd.compile_cache is seen, "the other thread still watches"
    inside.wait(10)
    other.join()
    assert interface._flash_attn_fwd.compile_cache is own and not tape.recording()
