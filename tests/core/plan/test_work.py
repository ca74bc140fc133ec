"""Dealing the mask out: each step alone, and what it is for."""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import (
    K0,
    K1,
    Q0,
    Q1,
    areas,
    cut_keys,
    cut_rows,
    normalise,
    to_dense,
)
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.assign import even_work
from customized_ops.ring_attention.core.plan.assign import work as work_module
from customized_ops.ring_attention.core.plan.assign.even_work import WORK_TOLERANCE, evened, shared
from customized_ops.ring_attention.core.plan.assign.work import (
    FEWER_BYTES,
    TEAM,
    area_per_team,
    nearest,
    owned,
)

many = settings(max_examples=75, deadline=None, derandomize=True)


@st.composite
def masks(draw) -> AttnMask:
    """Any disjoint slices over up to 60 tokens, often few rows over many keys."""
    q_len, k_len = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    taken, rows = np.zeros((q_len, k_len), dtype=bool), []
    for _ in range(draw(st.integers(0, 6))):
        q0, q1 = sorted(draw(st.tuples(st.integers(0, q_len), st.integers(0, q_len))))
        k0, k1 = sorted(draw(st.tuples(st.integers(0, k_len), st.integers(0, k_len))))
        lo, hi = draw(st.sampled_from([(-99, 99), (-99, 0), (-5, 3), (0, 99)]))
        one = normalise(np.array([(q0, q1, k0, k1, lo, hi)], dtype=np.int64))
        pairs = to_dense(one, q_len, k_len)
        if len(one) and not (pairs & taken).any():
            taken |= pairs
            rows.append(one[0].tolist())
    return AttnMask.from_slices(rows, q_len, k_len)


@st.composite
def layouts(draw, total: int, ranks: int) -> Layout:
    kind = draw(st.sampled_from(["contiguous", "zigzag", "sizes"]))
    if kind != "sizes":
        return getattr(Layout, kind)(total, ranks)
    cuts = draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))
    return Layout.from_sizes(np.diff([0, *sorted(cuts), total]).tolist())


@st.composite
def cases(draw):
    """(mask, q layout, k layout, ranks in a team)"""
    mask = draw(masks())
    ranks, team_size = draw(st.sampled_from([(1, 1), (3, 1), (4, 1), (4, 2), (8, 1), (6, 3)]))
    return mask, draw(layouts(mask.q_len, ranks)), draw(layouts(mask.k_len, ranks)), team_size


def assert_assigns(work: np.ndarray, mask: AttnMask, teams: int) -> None:
    """Every pair of the mask to one team, in normalised slices."""
    count = np.zeros((mask.q_len, mask.k_len), dtype=int)
    for one in work[:, :TEAM]:
        count += to_dense(one[None], mask.q_len, mask.k_len)
    assert (count == mask.to_dense()).all()
    assert work[:, :TEAM].tolist() == normalise(work[:, :TEAM]).tolist()
    assert ((work[:, TEAM] >= 0) & (work[:, TEAM] < teams)).all()
    assert area_per_team(work, teams).sum() == mask.area


def row_team(layout: Layout, team_size: int) -> np.ndarray:
    """int[total]: the team that holds each token."""
    team = np.zeros(layout.total, dtype=int)
    for rank in range(layout.group_size):
        team[layout.positions(rank)] = rank // team_size
    return team


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


def global_and_local(tokens: int, at: int, globals_: int = 64, window: int = 512) -> AttnMask:
    """Tokens from ``at`` on attend everything and everything attends them, beside a window."""
    end = at + globals_
    rows = [
        (at, end, 0, tokens, -tokens, tokens),
        (0, at, at, end, -tokens, tokens),
        (end, tokens, at, end, -tokens, tokens),
        (0, at, 0, at, -window, 0),
        (end, tokens, end, tokens, -window, 0),
    ]
    if at:  # the window goes on over the global tokens
        rows.append((end, tokens, 0, at, -window, 0))
    return AttnMask.from_slices(rows, tokens, tokens)


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


# ----------------------------------------------------------------------- shared


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("tokens", [8192, 100_003])
def test_contiguous_causal_shards_are_shared_evenly(tokens, ranks):
    """Half of what is between two ranks for each; nobody computes rows of one peer over keys of
    another."""
    layout = Layout.contiguous(tokens, ranks)
    work = shared(owned(AttnMask.causal(tokens).slices, layout, 1), layout, layout, 1)
    area = area_per_team(work, ranks)
    assert area.max() <= area.mean() * (1 + 256 * ranks / tokens)
    held, by_others = row_team(layout, 1), 0
    for q0, q1, k0, k1, *_, team in work.tolist():
        by_row = (held[q0:q1] == team).all()
        assert by_row or (held[k0:k1] == team).all()
        by_others += not by_row
    assert by_others == ranks * (ranks - 1) / 2


@many
@given(data=st.data())
def test_shares_are_as_even_as_they_can_be(data):
    """Against a linear program, over any areas between the rows of one team and keys of another, or
    between neighbours alone, where work travels far."""
    n, chain = data.draw(st.integers(2, 8)), data.draw(st.booleans())
    some = st.sampled_from([0, 0, 1, 3, 10, 100])
    between = np.array(data.draw(st.lists(some, min_size=n * n, max_size=n * n)), dtype=float)
    between = between.reshape(n, n)
    if chain:
        between *= np.eye(n) + np.eye(n, k=-1)
    given_away = even_work._fractions_given(between)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b and between[a, b]]
    load = between.sum(1)
    for a, b in pairs:
        load[[a, b]] += np.array([-1, 1]) * given_away[a, b] * between[a, b]
    limits = np.zeros((n, len(pairs) + 1))
    limits[:, -1] = -1
    for m, (a, b) in enumerate(pairs):
        limits[[a, b], m] = -between[a, b], between[a, b]
    goal = [0] * len(pairs) + [1]
    bounds = [(0, 1)] * len(pairs) + [(None, None)]
    least = linprog(goal, A_ub=limits, b_ub=-between.sum(1), bounds=bounds).fun
    event(f"{len(pairs)} pairs")
    assert least - 1e-6 <= load.max() <= least + 0.02 * between.sum() / n + 1e-6


def test_what_is_even_or_too_much_is_not_shared(monkeypatch):
    mask = AttnMask.causal(512)
    layout, zigzag = Layout.contiguous(512, 4), Layout.zigzag(512, 4)
    even, uneven = owned(mask.slices, zigzag, 1), owned(mask.slices, layout, 1)
    assert shared(even, zigzag, zigzag, 1) is even
    assert shared(uneven, layout, layout, 1) is not uneven
    for limit, value in (("MOST_SHARED", 8), ("MOST_SHARING", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(even_work, limit, value)
            assert shared(uneven, layout, layout, 1) is uneven
    alone = owned(AttnMask.varlen([0, 400, 512]).slices, Layout.from_sizes([400, 112]), 1)
    kept = shared(alone, Layout.from_sizes([400, 112]), Layout.from_sizes([400, 112]), 1)
    assert kept is alone, "nothing lies between the two"


# ----------------------------------------------------------------------- evened


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("tokens", [8192, 100_003])
def test_evened_within_the_tolerance(ranks, tokens):
    mask, layout = AttnMask.dense(tokens, causal=True), Layout.contiguous(tokens, ranks)
    before = owned(mask.slices, layout, 1)
    area = area_per_team(evened(before, layout, 1), ranks)
    assert area.max() <= (1 + WORK_TOLERANCE) * area.mean()
    assert area_per_team(before, ranks).max() > 1.3 * area.mean()


def test_evened_moves_few_rows_in_few_transfers():
    """Causal: the last ranks give their last rows, which have the most keys."""
    ranks, tokens = 8, 8192
    layout = Layout.contiguous(tokens, ranks)
    work = evened(owned(AttnMask.dense(tokens, causal=True).slices, layout, 1), layout, 1)
    held = row_team(layout, 1)
    moved = work[held[work[:, Q0]] != work[:, TEAM]]
    assert len({(int(held[q0]), team) for q0, *_, team in moved.tolist()}) <= ranks - 1
    # No fewer rows can do than if each excess were cut from the rank's densest rows.
    area = area_per_team(owned(AttnMask.dense(tokens, causal=True).slices, layout, 1), ranks)
    ends = np.arange(1, ranks + 1) * (tokens // ranks)
    least = np.maximum(area - (1 + WORK_TOLERANCE) * area.mean(), 0) / ends
    assert least.sum() <= (moved[:, Q1] - moved[:, Q0]).sum() <= 1.3 * least.sum()


def test_evened_cuts_at_multiples_of_a_tile():
    """Work moves in 128 rows where that is fine enough."""
    layout = Layout.contiguous(1 << 17, 4)
    work = evened(owned(AttnMask.dense(1 << 17, causal=True).slices, layout, 1), layout, 1)
    assert (work[:, [Q0, Q1]] % 128 == 0).all() and len(work) > 4


def test_evened_leaves_a_few_percent_alone():
    layout = Layout.contiguous(1000, 2)
    slices = np.array([(0, 500, 0, 500, -999, 999), (500, 1000, 0, 509, -1999, 999)])
    at_home = owned(normalise(slices), layout, 1)
    assert evened(at_home, layout, 1) is at_home


def test_evened_gives_held_rows_only():
    """What came to a team because of its keys stays there."""
    mask = global_and_local(4096, 0, window=64)
    layout = Layout.from_sizes([1024, 1500, 548, 1024])
    near = nearest(owned(mask.slices, layout, 1), layout, 1, 4.0)
    even = evened(near, layout, 1)
    held = row_team(layout, 1)

    def remote(work):
        away = held[work[:, Q0]] != work[:, TEAM]
        return {tuple(row) for row in work[away].tolist()}

    assert even is not near and remote(near) < remote(even)


def test_cells():
    """Rows cut at the layout's pieces, at multiples of 128, and finer where they hold too much."""
    layout = Layout.zigzag(1000, 3)
    slices = np.array([(0, 1000, 0, 1000, -999, 999)], dtype=np.int64)
    for most in (1e9, 130_000.0, 5000.0, 10.0):
        cells, area = even_work._cells(slices, layout, most)
        bounds = [*cells[:, 0].tolist(), int(cells[-1, 1])]
        assert bounds[0] == 0 and bounds[-1] == 1000 and (np.diff(bounds) > 0).all()
        assert cells[1:, 0].tolist() == cells[:-1, 1].tolist()
        must = {0, 1000, *range(0, 1000, 128), *layout.pieces[:, 1].tolist()}
        assert must <= set(bounds) and (set(bounds) == must or most < 1e9)
        assert area.tolist() == (1000 * np.diff(bounds)).tolist()
        assert (area <= np.maximum(most, 1000)).all()


def test_nothing_to_assign():
    nowhere = Layout.contiguous(0, 4)
    at_home = owned(AttnMask.dense(0).slices, nowhere, 1)
    assert at_home.shape == (0, 7)
    assert nearest(at_home, nowhere, 1, 4.0) is at_home
    assert evened(at_home, nowhere, 1) is at_home
    somewhere = Layout.contiguous(3, 8)
    few = owned(AttnMask.dense(3).slices, somewhere, 1)
    assert few[:, TEAM].tolist() == [0, 1, 2] and areas(few[:, :TEAM]).tolist() == [3, 3, 3]


def test_columns_of_keys_are_whole_in_owned_work():
    """Owners cut rows alone."""
    work = owned(AttnMask.dense(64).slices, Layout.zigzag(64, 4), 1)
    assert (work[:, [K0, K1]] == [0, 64]).all()
