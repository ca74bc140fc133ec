"""What flash-attn-4 launches is seen, and launched again without its functions."""

from __future__ import annotations

import threading
from functools import partial
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from flash4_compiling import Compiling, forget, install_compiling
from torch.utils._python_dispatch import _disable_current_modes

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.kernels import ForwardOperands, Pairs, Scoring
from customized_ops.ring_attention.core.kernels.adapters import flash4, reference
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import flash4_library
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.run.replays import replay

SCORING = Scoring(0.3)
SEEN, CALLS = 2, 5  # calls before one is recorded, and of the test


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    return install_compiling(monkeypatch, SEEN)


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_are_launched_without_their_function(library: Compiling, packed: bool) -> None:
    calls_are_right([0, 70, 120] if packed else [0, 600])
    assert (library.launched, library.called) == (CALLS, SEEN + 1)


def calls_are_right(ends: list[int]) -> None:
    """Some calls, of other tensors each, as the first of all."""
    forget()
    pairs, _ = drawn(ends, 0)
    for seed in range(CALLS):
        _, given = drawn(ends, seed)
        agree_with_reference(replay.kernel_forward(flash4, given, pairs, SCORING), given, pairs)


def drawn(ends: list[int], seed: int) -> tuple[Pairs, ForwardOperands]:
    """The pairs of causal documents, and tensors."""
    mask, source = AttnMask.varlen(ends, causal=True), torch.Generator().manual_seed(seed)
    shapes = [(1, ends[-1], heads, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(s, dtype=torch.float64, generator=source) for s in shapes]
    return Pairs(mask.slices, mask.q_len, mask.k_len), ForwardOperands(*tensors)


def agree_with_reference(got: Any, given: ForwardOperands, pairs: Pairs) -> None:
    want = reference.forward(given, pairs, SCORING, None)
    for mine, his in zip(got, want, strict=True):
        torch.testing.assert_close(mine, his, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_versions_that_were_not_compared_are_not_replayed(
    library: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash4, "unproven_tapes", flash4_library.unproven_tapes)
    for version in ("4.1.0", None):
        monkeypatch.setattr(replay, "_checked", {})
        with monkeypatch.context() as patch:
            patch.setattr(flash4_library.metadata, "version", partial(installed, version))
            with pytest.warns(UserWarning, match="calls are not replayed: tapes of flash-attn-4"):
                calls_are_right([0, 600])
            calls_are_right([0, 600])  # said once
            patch.setenv("SEQSHARD_REPLAY", "1")
            library.called = 0
            calls_are_right([0, 600])
            assert library.called == SEEN + 1
        library.called = 0
    monkeypatch.setattr(replay, "_checked", {})
    monkeypatch.setattr(flash4_library.metadata, "version", lambda _: "4.0.0b36")
    calls_are_right([0, 600])
    assert library.called == SEEN + 1


def test_a_graph_of_the_program_has_no_tapes(
    library: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_capturing", lambda _: True)
    calls_are_right([0, 600])
    assert library.called == CALLS


def installed(version: str | None, name: str) -> str:
    if version is None:
        raise metadata.PackageNotFoundError(name)
    return version


def test_a_call_whose_kernels_are_not_seen_is_not_replayed(library: Compiling) -> None:
    """As of a version that keeps them elsewhere."""
    whole = Compiling.forward

    def unseen(**given: Any) -> tuple[Any, ...]:
        kept, interface = library.compile_cache, flash4_library.interface()
        watching, interface._flash_attn_fwd.compile_cache = (
            interface._flash_attn_fwd.compile_cache,
            kept,
        )
        try:
            return whole(library, **given)
        finally:
            interface._flash_attn_fwd.compile_cache = watching

    library.forward = unseen  # type: ignore[method-assign]
    calls_are_right([0, 600])
    assert library.called == CALLS


@pytest.mark.parametrize("hidden", ["an array", "in a list", "dlpack"])
def test_memory_that_is_hidden_in_an_argument_is_not_recorded(hidden: str) -> None:
    def launched(x: torch.Tensor) -> tuple[torch.Tensor]:
        made = torch.empty_like(x)
        with _disable_current_modes():
            view: Any = made.numpy()
        if hidden == "dlpack":
            view = SimpleNamespace(__dlpack__=made.__dlpack__, array=view)
        given = [view] if hidden == "in a list" else view
        tape.launch(lambda *_: None, x, given)
        return (made,)

    assert tape.record(lambda: launched(x), [x := torch.ones(3)])[1] is None


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
        assert interface.torch is not torch and interface.torch.float32 is torch.float32
        assert flash4_library.compiled() == len(own.cache) == 2
    assert interface._flash_attn_fwd.compile_cache is seen, "the other thread still watches"
    inside.wait(10)
    other.join()
    assert interface._flash_attn_fwd.compile_cache is own and not tape.recording()
    assert interface.torch is torch
    del interface.torch  # as of a version that imports its functions by name
    flash4_library._seen_functions.cache_clear()
    with flash4_library.watched():
        assert not hasattr(interface, "torch")
    assert interface._flash_attn_fwd.compile_cache is own and not hasattr(interface, "torch")
