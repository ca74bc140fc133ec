"""What a rank's plan tells of its rows and keys, against dense masks."""

import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import Slices, to_dense
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.assign.work import TEAM
from customized_ops.ring_attention.core.plan.rank_plan import Stage

MASKS = {
    "causal": AttnMask.causal(40),
    "packed": AttnMask.varlen([0, 11, 11, 12, 30, 40], causal=True),
    "window": AttnMask.dense(40, window=(5, 2)),
    "global rows": AttnMask.from_slices(
        [(0, 2, 0, 40, -99, 99), (2, 40, 0, 2, -99, 99), (2, 40, 2, 40, -5, 0)], 40, 40
    ),
    "nothing": AttnMask.from_slices([], 40, 40),
}
LAYOUTS = {
    "contiguous": Layout.contiguous(40, 4),
    "zigzag": Layout.zigzag(40, 4),
    "striped": Layout.striped(40, 4, 3),
    "uneven": Layout.from_sizes([7, 0, 33, 0]),
}


def plans(mask: AttnMask, layout: Layout) -> list[Plan]:
    return [
        make_plan(mask, layout, assignment=assignment, stages=stages, team_size=team_size)
        for assignment in ("owner", "balanced", "nearest")
        for stages in (0, 1, 3)
        for team_size in (1, 2, 4)
    ]


@pytest.mark.thin(3)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_hulls_and_parts(mask, layout):
    for plan in plans(mask, layout):
        for rank in range(plan.group_size):
            mine = plan.rank(rank)
            for stage in mine.stages:
                assert_hull(stage.own, stage.own_hull, stage.own_in_hull)
                assert_hull(stage.remote, stage.remote_hull, stage.remote_in_hull)
            assert mine.remote_parts == counted([met(s.remote, 0) for s in mine.stages])
            assert mine.row_parts == counted(row_parts(plan, rank))
            assert mine.key_parts == counted(key_parts(plan, rank))


def assert_hull(slices: Slices, hull: tuple[int, int], inside: Slices) -> None:
    """``hull`` is from the first to the last row of ``slices``; ``inside`` are these in it."""
    rows = np.flatnonzero(met(slices, 0))
    assert hull == ((rows[0], rows[-1] + 1) if len(rows) else (0, 0))
    start, stop = hull
    assert (to_dense(inside, stop - start, 99) == to_dense(slices, 99, 99)[start:stop]).all()


def met(slices: Slices, dim: int) -> np.ndarray:
    """bool[99]: rows, or keys, of which ``slices`` have a pair."""
    return to_dense(slices, 99, 99).any(axis=1 - dim)


def counted(parts: list[np.ndarray]) -> int:
    """The most of ``parts``, each bool[99], that hold one token."""
    return int(np.sum(parts, axis=0).max())


def elsewhere(plan: Plan, rank: int, dim: int) -> list[np.ndarray]:
    """bool[99] for each other team: which of the rank's rows, or keys, it has a part of."""
    found = []
    for team in set(plan.work[:, TEAM].tolist()) - {rank // plan.team_size}:
        pairs = to_dense(plan.work[plan.work[:, TEAM] == team, :TEAM], 40, 40)
        part = np.zeros(99, dtype=bool)
        own = plan.q_layout.positions(rank)
        part[: len(own)] = pairs.any(axis=1 - dim)[own]
        found.append(part)
    return found


def row_parts(plan: Plan, rank: int) -> list[np.ndarray]:
    here = [met(stage.own, 0) for stage in plan.rank(rank).stages]
    return here + elsewhere(plan, rank, 0)


def key_parts(plan: Plan, rank: int) -> list[np.ndarray]:
    def of(stage: Stage) -> list[np.ndarray]:
        if stage.kv is None:
            return [met(stage.own, 1), met(stage.remote, 1)]
        gathered = np.zeros(99, dtype=bool)
        if plan.gathered:  # the rank's own are among the others, in their global order
            own = plan.k_layout.positions(rank)
            gathered[: len(own)] = np.isin(own, stage.kv.indices)
        return [gathered]

    stages = plan.rank(rank).stages
    here = [part for stage in stages for part in of(stage)]
    # Each rank of a team may have a part, the others of the own one too.
    own_team = plan.work[plan.work[:, TEAM] == rank // plan.team_size, :TEAM]
    attended = np.zeros(99, dtype=bool)
    own = plan.k_layout.positions(rank)
    attended[: len(own)] = to_dense(own_team, 40, 40).any(axis=0)[own]
    others = [attended] * (plan.team_size - 1) + elsewhere(plan, rank, 1) * plan.team_size
    return here + others


def test_zigzag_over_two_ranks():
    """Two stages: each row of the back half is in both; rank 1 makes nothing of rank 0's end."""
    plan = make_plan(AttnMask.causal(16), Layout.zigzag(16, 2), stages=1)
    first, second = plan.rank(0), plan.rank(1)
    assert [stage.own_hull for stage in first.stages] == [(0, 8), (4, 8)]
    assert [stage.own_hull for stage in second.stages] == [(0, 8), (0, 8)]
    assert (first.row_parts, second.row_parts) == (2, 2)
    assert (first.key_parts, second.key_parts) == (2, 2)
    assert first.stages[1].own_in_hull[:, :2].tolist() == [[0, 4]]
