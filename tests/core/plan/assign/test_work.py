"""Dealing the mask out: each step alone, and what it is for."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import (
    K0,
    Q0,
    cut_keys,
    cut_rows,
    normalise,
    to_dense,
)
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.assign import work as work_module
from customized_ops.ring_attention.core.plan.assign.even_work import evened, shared
from customized_ops.ring_attention.core.plan.assign.work import (
    FEWER_BYTES,
    TEAM,
    area_per_team,
    nearest,
    owned,
)

from ..plan_cases import disjoint_slices, layouts, painted
from .work_cases import global_and_local, many, row_team


@st.composite
def masks(draw) -> AttnMask:
    """Up to 60 tokens, often few rows over many keys."""
    bands = st.sampled_from([(-99, 99), (-99, 0), (-5, 3), (0, 99)])
    return draw(disjoint_slices(draw(st.integers(0, 60)), draw(st.integers(0, 60)), bands))


@st.composite
def cases(draw):
    """(mask, q layout, k layout, ranks in a team)"""
    mask = draw(masks())
    ranks, team_size = draw(st.sampled_from([(1, 1), (3, 1), (4, 1), (4, 2), (8, 1), (6, 3)]))
    return mask, draw(layouts(mask.q_len, ranks)), draw(layouts(mask.k_len, ranks)), team_size


def assert_assigns(work: np.ndarray, mask: AttnMask, teams: int) -> None:
    """Every pair of the mask to one team, in normalised slices."""
    assert (painted(work[:, :TEAM], mask.q_len, mask.k_len) == mask.to_dense()).all()
    assert work[:, :TEAM].tolist() == normalise(work[:, :TEAM]).tolist()
    assert ((work[:, TEAM] >= 0) & (work[:, TEAM] < teams)).all()
    assert area_per_team(work, teams).sum() == mask.area


@given(cases(), st.sampled_from([0.25, 1.0, 4.0, 16.0]))
@many
def test_every_step_assigns_each_pair_once(case, row_cost):
    mask, q_layout, k_layout, team_size = case
    teams = q_layout.group_size // team_size
    held = row_team(q_layout, team_size)
    at_home = owned(mask.slices, q_layout, team_size)
    assert_assigns(at_home, mask, teams)
    for q0, q1, *_, team in at_home.tolist():
        assert (held[q0:q1] == team).all()
    near = nearest(at_home, k_layout, team_size, row_cost)
    assert_assigns(near, mask, teams)
    event(f"rows move: {near is not at_home}")
    both = shared(at_home, q_layout, k_layout, team_size)
    assert_assigns(both, mask, teams)
    key_held = row_team(k_layout, team_size)
    for q0, q1, k0, k1, *_, team in both.tolist():
        assert (held[q0:q1] == team).all() or (key_held[k0:k1] == team).all()
    areas_of = [area_per_team(w, teams).max(initial=0) for w in (at_home, both)]
    assert both is at_home or areas_of[1] < areas_of[0]
    event(f"shared: {both is not at_home}")
    for work in (at_home, near, both):
        even = evened(work, q_layout, team_size)
        assert_assigns(even, mask, teams)
        before, after = (area_per_team(w, teams).max(initial=0) for w in (work, even))
        assert even is work or after < before
        event(f"evened: {even is not work}")


@given(masks(), st.lists(st.integers(1, 20), min_size=1, max_size=6))
@many
def test_cuts(mask, lengths):
    """At tiles that need not reach all of the mask: the parts are what the tiles see."""
    ends = np.cumsum(lengths)
    tiles = np.column_stack([ends - lengths, ends]).astype(np.int64)
    dense = mask.to_dense()
    for cut, axis in ((cut_rows, 0), (cut_keys, 1)):
        x, tile, parts = cut(mask.slices, tiles)
        seen = np.zeros_like(dense, dtype=int)
        for n, (a, b) in enumerate(tiles.tolist()):
            here = to_dense(parts[tile == n], *dense.shape)
            assert not np.delete(here, np.s_[a:b], axis=axis).any()
            seen += here
        inside = np.zeros(dense.shape[axis], dtype=bool)
        inside[: ends[-1]] = True
        assert (seen == (dense.T & inside).T if axis == 0 else seen == (dense & inside)).all()
        for n in range(len(mask.slices)):
            whole = to_dense(mask.slices[n : n + 1], *dense.shape)
            assert not (to_dense(parts[x == n], *dense.shape) & ~whole).any()


# ------------------------------------------------------------------- rows move


def team_load(work, q_layout: Layout, k_layout: Layout, team_size: int, row_cost: float) -> float:
    """The busiest team's keys received and rows received and sent, in keys, painted token by
    token."""
    q_team, k_team = row_team(q_layout, team_size), row_team(k_layout, team_size)
    teams = q_layout.group_size // team_size
    load = np.zeros(teams)
    shape = q_layout.total, k_layout.total
    for team in range(teams):
        pairs = to_dense(work[work[:, TEAM] == team, :TEAM], *shape)
        load[team] += (pairs.any(axis=0) & (k_team != team)).sum()
        moved = pairs.any(axis=1) & (q_team != team)
        load[team] += row_cost / 2 * moved.sum()
        load += row_cost / 2 * np.bincount(q_team[moved], minlength=teams)
    return load.max()


@given(cases(), st.sampled_from([0.25, 1.0, 4.0]))
@many
def test_rows_move_only_where_the_busiest_team_has_less(case, row_cost):
    mask, q_layout, k_layout, team_size = case
    at_home = owned(mask.slices, q_layout, team_size)
    near = nearest(at_home, k_layout, team_size, row_cost)
    before, after = (
        team_load(work, q_layout, k_layout, team_size, row_cost) for work in (at_home, near)
    )
    assert after <= (before if near is at_home else FEWER_BYTES * before)
    event(f"rows move: {near is not at_home}")


def test_few_queries_go_to_the_keys():
    """64 x 4096 over 8 ranks: 64 rows a rank beat 4096 keys."""
    mask = AttnMask.dense(64, 4096)
    layouts = Layout.contiguous(64, 8), Layout.contiguous(4096, 8)
    plan = make_plan(mask, *layouts, assignment="nearest")
    assert plan.kv_tokens().sum() == 0 and plan.shared_rows
    assert plan.q_tokens().tolist() == [[8 * 7, 64 - 8]] * 8
    assert plan.area.tolist() == [64 * 512] * 8
    at_home = busiest_bytes(make_plan(mask, *layouts, assignment="owner"))
    assert busiest_bytes(plan) < at_home / 3


def busiest_bytes(plan: Plan) -> int:
    """Of 32 query and 8 key heads of 128 in bf16, there and back, on the busiest link."""
    sizes = (32, 8, 128, None, 2)
    return int((plan.forward_bytes(*sizes) + plan.backward_bytes(*sizes)).max())


@pytest.mark.parametrize("at", [0, 30000])
def test_global_rows_go_to_the_keys(at):
    """64 global rows of 64k need every key; all else is near. Only those rows move."""
    mask, layout = global_and_local(65536, at), Layout.contiguous(65536, 8)
    owner, near, auto = (
        make_plan(mask, layout, assignment=a) for a in ("owner", "nearest", "auto")
    )
    assert owner.kv_tokens()[:, 1].max() > 50_000
    assert near.kv_tokens()[:, 1].max() < 2_000
    assert near.shared_rows and busiest_bytes(near) < busiest_bytes(owner) / 4
    assert busiest_bytes(auto) <= busiest_bytes(near)


def test_slices_whose_rows_stay_are_not_cut():
    """The window meets keys of two teams, and is whole."""
    mask, layout = global_and_local(4096, 0, window=64), Layout.contiguous(4096, 4)
    at_home = owned(mask.slices, layout, 1)
    near = nearest(at_home, layout, 1, 4.0)
    global_rows = at_home[:, Q0] == 0
    window = {tuple(row) for row in at_home[at_home[:, K0] > 64].tolist()}
    assert len(window) == 3 and global_rows.sum() == 1 and near is not at_home
    assert window <= {tuple(row) for row in near.tolist()}


def test_rows_stay_where_keys_are_as_cheap():
    """Nothing to gain: full attention with as many rows as keys, whatever a row costs from 2 up."""
    layout = Layout.contiguous(512, 4)
    for mask in (AttnMask.dense(512), AttnMask.dense(512, causal=True)):
        at_home = owned(mask.slices, layout, 1)
        for row_cost in (2.0, 4.0, 32.0):
            assert nearest(at_home, layout, 1, row_cost) is at_home


def test_too_many_parts_are_left_at_home(monkeypatch):
    mask, layout = AttnMask.dense(64, 4096), Layout.contiguous(64, 8)
    keys = Layout.contiguous(4096, 8)
    at_home = owned(mask.slices, layout, 1)
    assert nearest(at_home, keys, 1, 4.0) is not at_home
    monkeypatch.setattr(work_module, "MAX_PARTS", 63)
    assert nearest(at_home, keys, 1, 4.0) is at_home


def test_few_rows_move_to_the_keys_of_many_ranks() -> None:
    """512 rows over 4M keys are half a million parts."""
    rows, keys = Layout.contiguous(512, 512), Layout.zigzag(512 * 8192, 512)
    given = {"heads": (32, 32), "assignment": "nearest"}
    plan = make_plan(AttnMask.dense(rows.total, keys.total), rows, keys, **given)
    assert plan.kv_tokens().max() == 0 and plan.q_tokens()[:, 1].min() == 511
