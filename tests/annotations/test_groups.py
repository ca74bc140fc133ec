"""Process groups that only their members make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from annotations import groups


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_is_not_split_off_the_world(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Which would wait for all ranks, where the world is bound to a device."""
    world = SimpleNamespace(bound_device_id="cuda:1")
    asked: list[tuple[list[int], Any]] = []

    def new_group(ranks: list[int], use_local_synchronization: bool) -> Any:
        assert use_local_synchronization
        asked.append((ranks, world.bound_device_id))
        if fails:
            raise RuntimeError("no group")
        return SimpleNamespace(group_name="made")

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: 2,
        get_world_size=lambda: 4,
        group=SimpleNamespace(WORLD=world),
        new_group=new_group,
    )
    monkeypatch.setattr(groups, "dist", fake)
    monkeypatch.setattr(groups, "_by_ranks", {})
    if fails:
        with pytest.raises(RuntimeError, match="no group"):
            groups.name_of_ranks((0, 2))
    else:
        assert groups.name_of_ranks((0, 2)) == "made"
    assert asked == [([0, 2], None)]
    assert world.bound_device_id == "cuda:1"
