"""Tests of passes that come again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_sided_memory import InProcessOneSided
from replay_cases import SEEN
from torch.utils._python_dispatch import TorchDispatchMode

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.run import replay, seen_before
from customized_ops.ring_attention.core.tape import recorder


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded after fewer calls."""
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", SEEN)
    monkeypatch.setattr(replay, "_of_pairs", seen_before.SeenBefore())
    monkeypatch.setattr(replay, "_of_plans", seen_before.SeenBefore())


@pytest.fixture(autouse=True)
def everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch dispatches while a pass is recorded, a function that the recorder saw has called,
    or a launch."""
    unseen: list[str] = []

    class Witness(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen = not torch._C._is_torch_function_mode_enabled()
            # The masks of the stand-in for a kernel are made from arrays.
            if not seen and func is not torch.ops.aten.lift_fresh.default:
                unseen.append(str(func))
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))

    class Watched(recorder.Recorder):
        def __enter__(self) -> Any:
            self.witness = Witness()
            self.witness.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self.witness.__exit__(*error)

    monkeypatch.setattr(recorder, "Recorder", Watched)
    yield
    assert not unseen, set(unseen)


@pytest.fixture(params=[False, True], ids=["after some", "at once"])
def from_the_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a pass is recorded the first time it comes, as of a plan that is expected to come
    often: it sends tables, and fills caches."""
    if request.param:
        monkeypatch.setattr(seen_before.SeenBefore, "expected", lambda _: seen_before.SEEN_BEFORE)
    return bool(request.param)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of passes that came from tapes."""
    seen: list[int] = []
    whole = InProcessOneSided.replay

    def replay(self: InProcessOneSided, moved: Any, run: Any) -> Any:
        seen.append(self.rank)
        return whole(self, moved, run)

    monkeypatch.setattr(InProcessOneSided, "replay", replay)
    monkeypatch.setattr(inprocess, "InProcessComm", InProcessOneSided)
    return seen
