"""Tests of passes that come again."""

from __future__ import annotations

from typing import Any

import pytest
from one_sided_memory import InProcessOneSided
from replay_cases import SEEN

from customized_ops.ring_attention.core.comm import inprocess
from customized_ops.ring_attention.core.run import replay, seen_before


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are recorded after fewer calls."""
    monkeypatch.setattr(seen_before, "SEEN_BEFORE", SEEN)
    monkeypatch.setattr(replay, "_of_pairs", seen_before.SeenBefore())
    monkeypatch.setattr(replay, "_of_plans", seen_before.SeenBefore())


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
