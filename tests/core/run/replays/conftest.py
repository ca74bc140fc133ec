"""Tests of passes that come again."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from one_sided_memory import InProcessOneSided
from replay_cases import SEEN
from torch.utils._python_dispatch import TorchDispatchMode

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.run.replays import replay, seen_before
from customized_ops.ring_attention.core.tape import record, recording


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded, and tapes compiled, after fewer calls."""
    monkeypatch.setattr(import_module("customized_ops.ring_attention.core.tape.tape"), "OFTEN", 2)
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", SEEN)
    monkeypatch.setattr(replay, "_of_pairs", seen_before.SeenBefore())
    monkeypatch.setattr(replay, "_of_plans", seen_before.SeenBefore())


@pytest.fixture(autouse=True)
def everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch dispatches while a pass is recorded is a view, or inside a call that is noted."""
    unseen: list[str] = []

    class Witness(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if recording() and not func.is_view:
                unseen.append(str(func))
            return func(*args, **(kwargs or {}))

    def watched(function: Any, inputs: Any) -> Any:
        with Witness():
            return record(function, inputs)

    monkeypatch.setattr(replay, "record", watched)
    yield
    assert not unseen, set(unseen)


@pytest.fixture(params=[False, True], ids=["after some", "at once"])
def from_the_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a pass is recorded the first time it comes, as of a plan that is expected to come
    often: it sends tables, and fills caches."""
    if request.param:
        monkeypatch.setattr(seen_before.SeenBefore, "expected", lambda _: seen_before.OFTEN)
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
