"""Plans: every pair of the mask once, and only what is needed crosses a link."""

from functools import cache
from math import gcd

import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.assign.work import TEAM
from customized_ops.ring_attention.core.plan.choose.search import ASSIGNMENTS

from .plan_cases import moved, moves_of, painted

MASKS = {
    "full": AttnMask.dense(41),
    "causal": AttnMask.dense(41, causal=True),
    "window": AttnMask.dense(41, window=(5, 2)),
    "packed": AttnMask.varlen([0, 11, 11, 12, 30, 41, 41], causal=True),
    "sink": AttnMask.from_slices([(0, 41, 0, 3, -99, 0), (0, 41, 3, 41, -6, 0)], 41, 41),
    "sparse": AttnMask.from_slices(
        [(0, 9, 30, 37, -99, 99), (5, 20, 0, 8, -99, -7), (35, 41, 36, 41, 0, 9)], 41, 41
    ),
    "nothing": AttnMask.from_slices([], 41, 41),
    "no tokens": AttnMask.dense(0),
    "cross": AttnMask.dense(23, 41, causal=True),
    "more queries": AttnMask.dense(41, 23, causal=True),
    "global rows": AttnMask.from_slices(
        [(0, 2, 0, 41, -99, 99), (2, 41, 0, 2, -99, 99), (2, 41, 2, 41, -5, 0)], 41, 41
    ),
    "few queries": AttnMask.dense(5, 60),
    "one key wide": AttnMask.from_slices([(n, 41, n, n + 1, -99, 99) for n in (0, 3, 40)], 41, 41),
    "striped rows": AttnMask.from_slices(
        [(n, n + 9, 8 * k, 8 * k + 3, -99, 99) for n in range(0, 32, 9) for k in range(5)], 41, 41
    ),
}


def layout_pairs(q_len: int, k_len: int) -> list[tuple[Layout, Layout]]:
    """Layouts of the queries and of the keys, over as many ranks."""

    def uneven(total):
        return Layout.from_sizes([total // 3, 0, total - total // 3, 0])

    contiguous, zigzag = Layout.contiguous, Layout.zigzag
    return [
        (contiguous(q_len, 1), contiguous(k_len, 1)),
        (contiguous(q_len, 4), contiguous(k_len, 4)),
        (zigzag(q_len, 4), zigzag(k_len, 4)),
        (uneven(q_len), uneven(k_len)),
        (contiguous(q_len, 4), uneven(k_len)),
        (uneven(q_len), zigzag(k_len, 4)),
        (contiguous(q_len, 7), contiguous(k_len, 7)),
        (contiguous(q_len, 7), zigzag(k_len, 7)),
    ]


@cache
def plans(mask_name: str, assignment: str, stages: int) -> list[Plan]:
    """A plan for each pair of layouts, and one with split heads where the ranks make teams."""
    mask, made = MASKS[mask_name], []
    for n, (q_layout, k_layout) in enumerate(layout_pairs(mask.q_len, mask.k_len)):
        # Teams divide the ranks: alternately 2 and 4 of 4, and always 1 of 7.
        for team_size in {1, gcd(q_layout.group_size, 2 + n % 2 * 2)}:
            options = {"assignment": assignment, "stages": stages, "team_size": team_size}
            made.append(make_plan(mask, q_layout, k_layout, **options))
    return made


# "auto" assigns as one of these does: see below.
WAYS = [name for name in ASSIGNMENTS if name != "auto"]


def over_plans(test):
    """Parametrise over what :func:`plans` takes."""
    test = pytest.mark.parametrize("assignment", WAYS)(test)
    test = pytest.mark.parametrize("stages", [0, 1, 3])(test)
    return pytest.mark.parametrize("mask_name", MASKS)(test)


def assigned(plan: Plan, team: int) -> np.ndarray:
    """int[q_len, k_len]: how many of the team's slices hold each pair."""
    slices = plan.work[plan.work[:, TEAM] == team, :TEAM]
    return painted(slices, plan.mask.q_len, plan.mask.k_len)


def fetched(exchanges, held):
    """What each rank's receive buffer holds once all ranks have exchanged parts of ``held``."""
    mail = {}
    for sender, exchange in enumerate(exchanges):
        for peer, start, count in exchange.send.tolist():
            part = held[sender][start : start + count]
            assert len(part) == count > 0, "what is sent exists"
            mail.setdefault((sender, peer), []).append(part)
    buffers = []
    for receiver, exchange in enumerate(exchanges):
        parts = []
        for peer, start, count in exchange.recv.tolist():
            assert start == sum(map(len, parts)), "the buffer fills from the front"
            parts.append(mail[peer, receiver].pop(0))
            assert len(parts[-1]) == count, "both sides agree on the count"
        buffers.append(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
        assert buffers[-1].tolist() == exchange.indices.tolist(), "places say what is there"
    assert not any(mail.values()), "all that is sent is received"
    return buffers


def attended(plan):
    """int[team_size, q_len, k_len]: how often the ranks' calls attend each pair, in global indices,
    for each share of the heads."""
    ranks = range(plan.group_size)
    count = np.zeros((plan.team_size, plan.mask.q_len, plan.mask.k_len), dtype=int)
    own_rows = [plan.q_layout.positions(r) for r in ranks]
    own_keys = [plan.k_layout.positions(r) for r in ranks]
    remote_rows = fetched([plan.rank(r).q for r in ranks], own_rows)
    for n in range(plan.n_stages):
        stages = [plan.rank(r).stages[n] for r in ranks]
        local = all(stage.kv is None for stage in stages)
        assert local or all(stage.kv is not None for stage in stages)
        keys = own_keys if local else fetched([stage.kv for stage in stages], own_keys)
        for r, stage in enumerate(stages):
            for rows, slices in ((own_rows[r], stage.own), (remote_rows[r], stage.remote)):
                seen = painted(slices, len(rows), len(keys[r]))
                count[r % plan.team_size][np.ix_(rows, keys[r])] += seen
    return count


@pytest.mark.covering(1)
@over_plans
def test_calls_attend_every_pair_of_the_mask_once(mask_name, assignment, stages):
    for plan in plans(mask_name, assignment, stages):
        assert (attended(plan) == plan.mask.to_dense()).all(), plan.report(4, 4)
        areas = [plan.rank(r).area for r in range(plan.group_size)]
        assert areas == plan.area.tolist()
        assert sum(areas) == plan.mask.area * plan.team_size


@pytest.mark.covering(1)
@pytest.mark.parametrize("assignment", WAYS)
@pytest.mark.parametrize("mask_name", MASKS)
def test_every_pair_is_assigned_once(mask_name, assignment):
    for plan in plans(mask_name, assignment, 0):
        teams = range(plan.group_size // plan.team_size)
        times = sum(assigned(plan, team) for team in teams)
        assert (times == plan.mask.to_dense()).all(), plan.report(4, 4)
        assert set(plan.work[:, TEAM].tolist()) <= set(teams)


@pytest.mark.covering(1)
@over_plans
def test_what_is_needed_crosses_a_link_once_and_nothing_else(mask_name, assignment, stages):
    for plan in plans(mask_name, assignment, stages):
        received = np.zeros((2, plan.group_size), dtype=int)
        for rank in range(plan.group_size):
            team, mine = rank // plan.team_size, plan.rank(rank)
            pairs = assigned(plan, team)
            rows, keys = (np.flatnonzero(pairs.any(axis=axis)).tolist() for axis in (1, 0))
            assert sorted(moved(moves_of(plan, "q"), plan.q_layout, team)) == rows, plan.report(
                4, 4
            )
            assert sorted(moved(moves_of(plan), plan.k_layout, team)) == keys, plan.report(4, 4)
            own_rows = set(plan.q_layout.positions(rank).tolist())
            own_keys = set(plan.k_layout.positions(rank).tolist())
            got_rows = mine.q.indices.tolist()
            got_keys = [n for s in mine.stages if s.kv is not None for n in s.kv.indices.tolist()]
            if plan.gathered:  # its own are copied beside them
                assert sorted(got_keys) == keys
            else:
                assert sorted(got_keys) == sorted(set(keys) - own_keys)
            assert sorted(got_rows) == sorted(set(rows) - own_rows)
            received[:, rank] = len(set(keys) - own_keys), len(got_rows)
        for tokens, links, want in zip(
            (plan.kv_tokens(), plan.q_tokens()), plan.traffic(), received, strict=True
        ):
            assert tokens[:, 1].tolist() == links.sum(axis=0).tolist() == want.tolist()
            assert tokens[:, 0].tolist() == links.sum(axis=1).tolist()
            assert not links.diagonal().any()


@pytest.mark.covering(1)
@pytest.mark.parametrize("assignment", WAYS)
@pytest.mark.parametrize("mask_name", MASKS)
def test_owners_compute_their_rows(mask_name, assignment):
    """Rows move under other assignments only, and a plan knows whether several teams share one."""
    for plan in plans(mask_name, assignment, 1):
        shared = np.zeros(plan.mask.q_len, dtype=int)
        for team in range(plan.group_size // plan.team_size):
            rows = np.flatnonzero(assigned(plan, team).any(axis=1))
            shared[rows] += 1
            if assignment == "owner":
                ranks = range(team * plan.team_size, (team + 1) * plan.team_size)
                held = np.concatenate([plan.q_layout.positions(r) for r in ranks])
                assert set(rows.tolist()) <= set(held.tolist())
        assert plan.shared_rows == (shared > 1).any()
        assert all(plan.rank(r).shared_rows == plan.shared_rows for r in range(plan.group_size))
        if assignment in ("owner", "balanced", "zigzag"):
            assert not plan.shared_rows


@pytest.mark.thin(2)
@pytest.mark.parametrize("mask_name", MASKS)
def test_auto_assigns_as_another_does(mask_name):
    ways = [plans(mask_name, assignment, 0) for assignment in WAYS]
    for auto, *others in zip(plans(mask_name, "auto", 0), *ways, strict=True):
        assert auto.work.tolist() in [plan.work.tolist() for plan in others]


def test_keys_move_to_the_rows_or_rows_to_the_keys():
    """Of the masks above, some make rows meet in several places, and some teams share heads."""
    everywhere = [plan for name in MASKS for plan in plans(name, "nearest", 1)]
    assert sum(plan.shared_rows for plan in everywhere) > 10
    assert sum(plan.shared_rows and plan.team_size > 1 for plan in everywhere) >= 3


@pytest.mark.parametrize("group_size", [2, 3])
def test_long_masks_attend_every_pair_once(group_size):
    """Rows given away are cut at multiples of 128 where that is fine enough."""
    mask, layout = AttnMask.dense(1500, causal=True), Layout.contiguous(1500, group_size)
    plan = make_plan(mask, layout, assignment="balanced")
    assert plan.q_tokens().sum() > 0
    assert (attended(plan) == mask.to_dense()).all()


def test_moves_do_not_depend_on_how_the_mask_is_cut():
    """A rank asks once for keys that several slices need, or that touch."""
    whole = AttnMask.dense(40, causal=True)
    cut = AttnMask.from_slices(
        [(q, q + 8, k, k + 5, -40, 0) for q in range(0, 40, 8) for k in range(0, 40, 5)], 40, 40
    )
    assert len(cut.slices) > 8 and (cut.to_dense() == whole.to_dense()).all()
    for stages in (0, 1):
        for assignment in ("owner", "balanced", "zigzag"):
            a, b = (
                make_plan(m, Layout.zigzag(40, 4), stages=stages, assignment=assignment)
                for m in (whole, cut)
            )
            assert a.kv_needed.tolist() == b.kv_needed.tolist()
            assert a.q_needed.tolist() == b.q_needed.tolist()
