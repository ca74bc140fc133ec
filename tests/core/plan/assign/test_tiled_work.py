"""Work on a grid of teams: who has which tile, and how many tokens that takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.intervals import union
from customized_ops.ring_attention.core.mask.slices import K0, K1, Q0, Q1
from customized_ops.ring_attention.core.plan.assign import tiled_work
from customized_ops.ring_attention.core.plan.assign.tiled_work import numbers_of_blocks, tiled
from customized_ops.ring_attention.core.plan.assign.work import TEAM, Work, area_per_team

from .work_cases import row_team

SHARD = 10
LAYOUTS = [Layout.contiguous, Layout.zigzag, partial(Layout.striped, block=5)]


def teams_met(work: Work, layout: Layout, size: int, columns: tuple[int, int]) -> list[set[int]]:
    """Which teams hold the tokens that each team attends."""
    holder, teams = row_team(layout, size), layout.group_size // size
    needed = union(work[:, TEAM], work[:, columns[0]], work[:, columns[1]])
    return [
        {int(t) for _, a, b in needed[needed[:, 0] == team] for t in holder[a:b]}
        for team in range(teams)
    ]


@pytest.mark.parametrize("make", LAYOUTS, ids=["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_tile_of_each_team(make: Callable[..., Layout], size: int) -> None:
    """Twelve teams in three blocks, as in the module's drawing."""
    layout = make(12 * size * SHARD, 12 * size)
    work = tiled(AttnMask.dense(layout.total).slices, layout, layout, size, 3)
    assert work is not None
    rows, keys = (teams_met(work, layout, size, of) for of in ((Q0, Q1), (K0, K1)))
    assert rows[5] == {1, 5, 9} and keys[5] == {4, 5, 6, 7}
    for team in range(12):
        assert rows[team] == {team % 4, team % 4 + 4, team % 4 + 8}
        assert keys[team] == {team // 4 * 4 + n for n in range(4)}
    assert (area_per_team(work, 12) == layout.total**2 / 12).all()


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_zigzag_shards_of_a_causal_mask_are_even(blocks: int) -> None:
    layout = Layout.zigzag(64 * SHARD, 32)
    work = tiled(AttnMask.causal(layout.total).slices, layout, layout, 1, blocks)
    assert work is not None
    area = area_per_team(work, 32)
    assert area.sum() == layout.total * (layout.total + 1) / 2
    assert (area == area.mean()).all()


def test_layouts_of_rows_and_of_keys_may_differ() -> None:
    rows, keys = Layout.zigzag(240, 12), Layout.contiguous(120, 12)
    work = tiled(AttnMask.dense(240, 120).slices, rows, keys, 1, 2)
    assert work is not None
    assert teams_met(work, rows, 1, (Q0, Q1))[7] == {1, 7}
    assert teams_met(work, keys, 1, (K0, K1))[7] == set(range(6, 12))


def test_numbers_of_blocks() -> None:
    assert numbers_of_blocks(36) == [2, 3, 4, 6]
    assert numbers_of_blocks(4) == [2]
    assert all(numbers_of_blocks(n) == [] for n in (1, 2, 3, 7, 31))


@pytest.mark.parametrize("most", [0, 1])
def test_too_many_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, or of rows and keys; as of striped layouts."""
    layout, slices = Layout.contiguous(640, 16), AttnMask.dense(640).slices
    work = tiled(slices, layout, layout, 1, 4)
    assert work is not None and len(work) == 4 * 16
    striped = Layout.striped(16 * 64, 16, 1)
    assert tiled(AttnMask.dense(striped.total).slices, striped, striped, 1, 4) is None
    monkeypatch.setattr(tiled_work, "MOST_TILES", most)
    assert tiled(slices, layout, layout, 1, 4) is None
