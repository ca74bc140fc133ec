import runpy
import subprocess
import sys
from functools import cache
from math import gcd
from pathlib import Path

import numpy as np
import pytest

from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.layout import Layout, LayoutError
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import to_dense
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan import plan as plan_module
from customized_ops.ring_attention.core.plan.assign.work import TEAM
from customized_ops.ring_attention.core.plan.choose.search import ASSIGNMENTS
from customized_ops.ring_attention.core.plan.heads import largest_share
from customized_ops.ring_attention.core.plan.moves import (
    RECV,
    SEND,
    SEND_OFFSET,
    TOKEN0,
    TOKEN1,
    located,
    ring_stage,
)

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


def moves_of(plan: Plan, side: str = "kv") -> np.ndarray:
    """Who sends what to whom, a rank's own included."""
    needed, layout = (
        (plan.q_needed, plan.q_layout) if side == "q" else (plan.kv_needed, plan.k_layout)
    )
    return located(needed, layout.pieces)


def layout_pairs(q_len: int, k_len: int) -> list[tuple[Layout, Layout]]:
    """Layouts of the queries and of the keys, over as many ranks."""

    def uneven(total):
        return Layout.from_sizes([total // 3, 0, total - total // 3, 0])

    def contiguous(ranks):
        return lambda total: Layout.contiguous(total, ranks)

    def zigzag(ranks):
        return lambda total: Layout.zigzag(total, ranks)

    kinds = [
        (contiguous(1), contiguous(1)),
        (contiguous(4), contiguous(4)),
        (zigzag(4), zigzag(4)),
        (uneven, uneven),
        (contiguous(4), uneven),
        (uneven, zigzag(4)),
        (contiguous(7), contiguous(7)),
        (contiguous(7), zigzag(7)),
    ]
    return [(of_q(q_len), of_k(k_len)) for of_q, of_k in kinds]


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
    count = np.zeros((plan.mask.q_len, plan.mask.k_len), dtype=int)
    for one in plan.work[plan.work[:, TEAM] == team, :TEAM]:
        count += to_dense(one[None], *count.shape)
    return count


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
                for one in slices:
                    seen = to_dense(one[None], len(rows), len(keys[r]))
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


def moved(moves: np.ndarray, layout: Layout, team: int) -> list[int]:
    """Tokens that ``team`` is said to need, each from where it is."""
    tokens = []
    for move in moves[moves[:, RECV] == team].tolist():
        span = range(move[TOKEN0], move[TOKEN1])
        held = layout.positions(move[SEND])[move[SEND_OFFSET] :][: len(span)]
        assert held.tolist() == list(span) and len(span) > 0
        tokens += span
    return tokens


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


def imbalance(plan) -> float:
    """As the report says, after checking what it says."""
    areas = [plan.rank(r).area for r in range(plan.group_size)]
    label, _, ratio = plan.report(8, 8).splitlines()[-1].partition(": ")
    assert label == "imbalance (largest / mean)"
    assert ratio == f"{max(areas) * len(areas) / sum(areas):.3f}"
    return float(ratio)


def test_balance_of_contiguous_causal():
    mask, layout = AttnMask.dense(8192, causal=True), Layout.contiguous(8192, 8)
    owner = make_plan(mask, layout, assignment="owner")
    assert imbalance(owner) > 1.8 and owner.q_tokens().sum() == 0
    balanced = make_plan(mask, layout, assignment="balanced")
    assert imbalance(balanced) <= 1.02
    assert balanced.q_tokens()[:, 0].max() <= 8192 // 8, "no rank gives more than it holds"
    zigzag = make_plan(mask, layout, assignment="zigzag")
    assert imbalance(zigzag) == 1.0
    assert 4 * balanced.q_tokens().sum() < zigzag.q_tokens().sum()


def test_balance_of_teams():
    mask, layout = AttnMask.dense(8192, causal=True), Layout.contiguous(8192, 8)
    for team_size in (2, 4):
        plan = make_plan(mask, layout, assignment="balanced", team_size=team_size)
        assert imbalance(plan) <= 1.02
    whole = make_plan(mask, layout, assignment="owner", team_size=8)
    assert imbalance(whole) == 1.0, "one team of all ranks is Ulysses"
    assert (whole.q_tokens()[:, 1] == 8192 - 1024).all()
    assert (whole.kv_tokens()[:, 1] == 8192 - 1024).all()


@pytest.mark.parametrize(
    ("mask", "layout", "limit"),
    [
        (AttnMask.dense(8192, window=(1024, 0)), Layout.contiguous(8192, 8), 1.02),
        (AttnMask.varlen([0, 6000, 6100, 8192], causal=True), Layout.contiguous(8192, 8), 1.02),
        (AttnMask.dense(8192, causal=True), Layout.from_sizes([8000, 0, 192, 0]), 1.02),
        (AttnMask.dense(1024, 4096, causal=True), Layout.contiguous(1024, 2), 1.02),
        (AttnMask.dense(65536, causal=True), Layout.contiguous(65536, 64), 1.02),
        # Cells are whole rows, here up to a sixth of the mean.
        (AttnMask.dense(100, causal=True), Layout.contiguous(100, 8), 1.1),
    ],
)
def test_balance_of_other_masks(mask, layout, limit):
    keys = Layout.contiguous(mask.k_len, layout.group_size)
    before = imbalance(make_plan(mask, layout, keys, assignment="owner"))
    for assignment in ("balanced", "nearest"):
        plan = make_plan(mask, layout, keys, assignment=assignment)
        assert imbalance(plan) <= min(limit, before)


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("assignment", ["auto", "balanced", "nearest"])
def test_balanced_shards_move_no_rows(group_size, assignment):
    causal, full = AttnMask.dense(8192, causal=True), AttnMask.dense(8192)
    for mask, layout in ((causal, Layout.zigzag), (full, Layout.contiguous)):
        plan = make_plan(mask, layout(8192, group_size), assignment=assignment)
        assert plan.q_tokens().tolist() == [[0, 0]] * group_size
        assert imbalance(plan) == 1.0


def seconds_of(plan: Plan, q_heads: int = 32, kv_heads: int = 8) -> float:
    """Of a forward and backward, by the cost model."""
    return sum(each.seconds for each in H200.passes(plan, q_heads, kv_heads, 128, 128, 2))


def test_of_equally_fast_plans_the_one_that_moves_less():
    """Global rows go to the keys, not all keys to them, also where links would keep up."""
    mask = AttnMask.global_local(65536, 1024, 256)
    auto, owner = (
        make_plan(mask, Layout.contiguous(65536, 4), assignment=how).kv_tokens()[:, 1].max()
        for how in ("auto", "owner")
    )
    assert auto < 0.1 * owner


@pytest.mark.covering(2)
@pytest.mark.parametrize("team_size", [1, 2])
@pytest.mark.parametrize("tokens", [512, 8192, 131072])
@pytest.mark.parametrize("kind", ["causal", "window", "few queries", "global"])
def test_auto_is_as_fast_as_the_rest(kind, tokens, team_size):
    """By the cost model; a simpler way is kept where another is faster by less than a twentieth."""
    mask = {
        "causal": AttnMask.dense(tokens, causal=True),
        "window": AttnMask.dense(tokens, causal=True, window=(tokens // 16, 0)),
        "few queries": AttnMask.dense(64, tokens),
        "global": global_and_local(tokens),
    }[kind]
    layouts = Layout.contiguous(mask.q_len, 8), Layout.contiguous(mask.k_len, 8)
    auto, *others = (
        seconds_of(make_plan(mask, *layouts, assignment=a, team_size=team_size))
        for a in ("auto", "owner", "balanced", "nearest", "shared")
    )
    assert 0.95 * auto <= min(others)


def global_and_local(tokens: int, globals_: int = 64, window: int = 256) -> AttnMask:
    """The first rows attend everything, everything attends them, and a causal window beside."""
    rows = [
        (0, globals_, 0, tokens, -tokens, tokens),
        (globals_, tokens, 0, globals_, -tokens, tokens),
        (globals_, tokens, globals_, tokens, -window, 0),
    ]
    return AttnMask.from_slices(rows, tokens, tokens)


def test_team_size_is_chosen_by_cost():
    """Of None the fastest: whole heads where nothing moves, teams where that moves less."""
    documents = AttnMask.varlen(range(0, 65537, 8192), causal=True)
    alone = make_plan(documents, Layout.contiguous(65536, 8), team_size=None)
    assert alone.team_size == 1 and alone.kv_tokens().sum() == 0
    full, layout = AttnMask.dense(65536), Layout.contiguous(65536, 8)
    heads = (8, 8)
    free = make_plan(full, layout, heads=heads, team_size=None)
    seconds = {
        n: seconds_of(make_plan(full, layout, heads=heads, team_size=n), *heads)
        for n in (1, 2, 4, 8)
    }
    assert 0.95 * seconds_of(free, *heads) <= min(seconds.values())
    for heads in ((1, 1), (2, 1), (6, 3), (12, 1)):
        free = make_plan(full, layout, heads=heads, team_size=None)
        seconds = [
            seconds_of(make_plan(full, layout, heads=heads, team_size=n), *heads)
            for n in (1, 2, 4, 8)
            if n <= heads[0]
        ]
        assert 0.95 * seconds_of(free, *heads) <= min(seconds)


def test_a_key_head_of_several_ranks_is_sent_to_each():
    """By hand: four ranks of one token; 6 query heads and one key head in shares of 1, 2, 1, 2."""
    layout = Layout.contiguous(4, 4)
    options = {"team_size": 4, "heads": (6, 1), "assignment": "owner", "stages": 1}
    plan = make_plan(AttnMask.dense(4), layout, **options)
    assert plan.heads_of_ranks(6, 1).tolist() == [[1, 1], [2, 1], [1, 1], [2, 1]]
    assert largest_share(6, 1, 4).q_heads == 2
    assert plan.imbalance(6, 1) == pytest.approx(2 / 1.5)
    # Keys of 10 and 5, rows of 10 go, out of 5 and lse of 4 / 2 come back, in elements.
    moved = plan.forward_bytes(6, 1, 10, 5, 2) / 2
    keys, row, result = 3 * 15, 10, 5 + 2
    want = [
        [keys + (6 - mine) * row + 3 * mine * result, keys + 3 * mine * row + (6 - mine) * result]
        for mine in (1, 2, 1, 2)
    ]
    assert moved.tolist() == want
    forward, _ = H200.passes(plan, 6, 1, 10, 5, 2)
    assert (forward.compute == forward.compute[0] * np.array([1, 2, 1, 2])).all()


@pytest.mark.parametrize("heads", [(32, 8), (64, 8), (16, 16), (32, 1)])
def test_of_plans_as_fast_the_one_with_fewer_calls(heads):
    """Holders of rows and of keys share what is between them: two calls on either of two ranks,
    where rows that are given away whole make three; unless the bytes cost time."""
    mask, layout = AttnMask.causal(65536), Layout.contiguous(65536, 2)
    fast, slow = H200, CostModel(link_bytes=4e9)

    def plan(costs, assignment="auto"):
        options = {"assignment": assignment, "costs": costs, "head_groups": 1}
        return make_plan(mask, layout, heads=heads, **options)

    def calls(plan):
        return max(plan.rank(r).calls(heads[1]) for r in range(2))

    def busiest(plan):
        return plan.forward_bytes(*heads, 128, 128, 2).max()

    assert [calls(plan(fast, name)) for name in ("balanced", "shared")] == [3, 2]
    assert calls(plan(fast)) == 2 or heads == (32, 1), "there a row costs 32 keys"
    assert busiest(plan(fast)) <= 1.6 * busiest(plan(fast, "balanced"))
    assert busiest(plan(slow)) <= 1.25 * busiest(plan(slow, "balanced"))
    assert (calls(plan(slow)) == 3) == (heads[0] >= 8 * heads[1])
    free = CostModel(call_seconds=0.0)
    assert calls(plan(free)) == calls(plan(fast)), "a call has an end even if the host starts none"


@pytest.mark.covering(2)
@pytest.mark.parametrize("stages", [0, 1])
@pytest.mark.parametrize("assignment", ["owner", "balanced", "nearest", "shared"])
@pytest.mark.parametrize("mask_name", ["causal", "window", "documents"])
def test_the_host_is_predicted_to_start_the_calls_that_are_made(mask_name, assignment, stages):
    mask = {
        "causal": AttnMask.causal(840),
        "window": AttnMask.sliding_window(840, 100, 0),
        "documents": AttnMask.varlen([0, 10, 300, 512, 840], causal=True),
    }[mask_name]
    costs = CostModel(call_seconds=1.0)
    for ranks, team_size in ((2, 1), (4, 1), (4, 2), (6, 3)):
        for layout in (Layout.contiguous(840, ranks), Layout.striped(840, ranks, block=35)):
            options = {"assignment": assignment, "stages": stages, "team_size": team_size}
            plan = make_plan(mask, layout, head_groups=1, costs=costs, **options)
            made = [plan.rank(r).calls(8) for r in range(ranks)]
            for predicted in costs.passes(plan, 32, 8, 128, 128, 2):
                assert predicted.launch.tolist() == made


def test_of_plans_with_as_many_calls_the_one_that_moves_less():
    """Few rows over many keys, all of whose bytes are hidden: rows go to the keys."""
    mask, heads = AttnMask.full(16384, 131072), (16, 16)
    layouts = Layout.contiguous(16384, 4), Layout.contiguous(131072, 4)
    auto, *others = (
        make_plan(mask, *layouts, heads=heads, assignment=name)
        for name in ("auto", "owner", "nearest")
    )
    owner, near = (plan.forward_bytes(*heads, 128, 128, 2).max() for plan in others)
    assert auto.forward_bytes(*heads, 128, 128, 2).max() == near < owner / 3
    assert auto.head_groups == 1 and auto.calls(16).max() == 2


def test_slow_links_change_the_plan():
    """Where a byte costs much, moving few rows is not worth it; where none, balance is."""
    mask, layout = AttnMask.dense(4096, causal=True), Layout.contiguous(4096, 4)
    eager = make_plan(
        mask, layout, costs=CostModel(link_bytes=1e15, step_seconds=0, call_seconds=0)
    )
    assert eager.q_tokens().sum() > 0
    lazy = make_plan(mask, layout, costs=CostModel(step_seconds=1.0))
    assert lazy.q_tokens().sum() == 0


def test_window_receives_a_halo_only():
    plan = make_plan(
        AttnMask.dense(8192, window=(100, 0)), Layout.contiguous(8192, 8), assignment="owner"
    )
    assert plan.kv_tokens()[:, 1].tolist() == [0] + [100] * 7
    assert plan.kv_tokens()[:, 0].tolist() == [100] * 7 + [0]


def test_documents_within_shards_move_nothing():
    plan = make_plan(AttnMask.varlen([0, 10, 16, 32]), Layout.contiguous(32, 2), assignment="owner")
    assert not plan.gathered and plan.n_stages == 1
    assert plan.kv_tokens().tolist() == plan.q_tokens().tolist() == [[0, 0]] * 2
    assert all(plan.rank(r).q.empty and plan.rank(r).stages[0].kv is None for r in range(2))
    assert plan.forward_bytes(4, 2, 64, None, 2).sum() == 0
    assert plan.backward_bytes(4, 2, 64, None, 2).sum() == 0


def test_default_stages():
    """Keys are gathered where so little is attended that the host would be what takes time."""

    def default(tokens, **options):
        return make_plan(AttnMask.causal(tokens), Layout.zigzag(tokens, 2), **options)

    for tokens in (256, 1024):
        assert default(tokens).gathered and default(tokens).n_stages == 1
    for tokens in (8192, 16384, 131072):
        assert not default(tokens).gathered and default(tokens).n_stages == 2
    assert default(8192, costs=CostModel(call_seconds=1e-3)).gathered
    assert not default(1024, costs=CostModel(call_seconds=0.0)).gathered
    alone = make_plan(AttnMask.varlen([0, 128, 256]), Layout.contiguous(256, 2))
    assert not alone.gathered and alone.n_stages == 1, "nothing moves"


def test_small_work_is_not_evened_out():
    """Moving rows is two calls more on a rank: on short documents that takes longer than it saves,
    but not on long ones."""

    def moved(scale):
        mask = AttnMask.varlen([scale * n for n in (0, 3, 4, 5, 6)], causal=True)
        return int(make_plan(mask, Layout.contiguous(6 * scale, 2)).q_tokens().sum())

    assert moved(256) == 0 < moved(8192)


def test_stages_go_by_ring_distance():
    plan = make_plan(AttnMask.dense(64), Layout.contiguous(64, 8), stages=3)
    moves = moves_of(plan)
    distance = (moves[:, SEND] - moves[:, RECV]) % 8
    stages = ring_stage(moves, 8, 3, 1)
    stage_at = dict(zip(distance.tolist(), stages.tolist(), strict=True))
    assert stage_at == {0: 0, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    assert plan.n_stages == 4


def test_stages_of_teams_go_by_distance_of_teams():
    """The other ranks of one's own team are in the first remote stage; stage 0 is a rank's own."""
    plan = make_plan(AttnMask.dense(64), Layout.contiguous(64, 8), stages=3, team_size=2)
    moves = moves_of(plan)
    distance = (moves[:, SEND] // 2 - moves[:, RECV]) % 4
    stages = ring_stage(moves, 8, 3, 2)
    stage_at = dict(zip(distance.tolist(), stages.tolist(), strict=True))
    assert stage_at == {0: 1, 1: 1, 2: 2, 3: 3}
    assert plan.n_stages == 4
    assert plan.rank(3).stages[0].kv is None and plan.rank(3).stages[0].area > 0


def test_plans_are_cached_by_value():
    def build(**options):
        mask = AttnMask.varlen([0, 20, 50], causal=True)
        return make_plan(mask, Layout.contiguous(50, 4), Layout.zigzag(50, 4), **options)

    assert build() is build()
    assert build() is build(assignment="auto", stages=None, heads=(32, 8), team_size=1)
    assert build() is build(costs=CostModel())
    assert build() is not build(team_size=2) and build() is not build(heads=(8, 8))
    assert build() is not build(assignment="owner")
    assert build() is not build(stages=2)
    assert build().rank(2) is build().rank(2)


def test_plans_are_deterministic():
    def tables():
        plan_module._PLANS.clear()
        mask = AttnMask.dense(1000, causal=True, window=(300, 0))
        plan = make_plan(mask, Layout.contiguous(1000, 7), stages=2)
        ranks = [plan.rank(r) for r in range(7)]
        parts = [plan.work, plan.q_needed, plan.kv_needed]
        for mine in ranks:
            parts += [mine.q.send, mine.q.recv]
            for stage in mine.stages:
                parts += [stage.own, stage.remote]
                parts += [] if stage.kv is None else [stage.kv.send, stage.kv.recv]
        return plan, [part.tolist() for part in parts]

    (first, first_tables), (second, second_tables) = tables(), tables()
    assert first is not second
    assert first_tables == second_tables


def test_a_plan_prints_as_its_report():
    layout = Layout.contiguous(24, 3)
    plan = make_plan(AttnMask.causal(24), layout, team_size=3, heads=(6, 3))
    assert str(plan) == plan.report(96, 24)
    assert str(plan).splitlines()[-1].startswith("imbalance (largest / mean): ")
    alone = make_plan(AttnMask.causal(24), layout)
    assert str(alone) == alone.report() == alone.report(32, 8, 128)


CAUSAL8 = AttnMask.dense(8, causal=True)
HALVES = Layout.contiguous(8, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (CAUSAL8, Layout.contiguous(6, 2)),
            {},
            LayoutError,
            "the mask is 8 queries x 8 keys, but the layouts hold 6 and 6 tokens",
        ),
        (
            (CAUSAL8, HALVES, Layout.contiguous(9, 2)),
            {},
            LayoutError,
            "the mask is 8 queries x 8 keys, but the layouts hold 8 and 9 tokens",
        ),
        (
            (CAUSAL8, HALVES, Layout.contiguous(8, 4)),
            {},
            LayoutError,
            "q is on 2 ranks and k on 4",
        ),
        (([1], HALVES), {}, ValueError, "make_plan: mask must be an AttnMask, got [1]"),
        ((CAUSAL8, 2), {}, LayoutError, "make_plan: layouts must be Layouts, got 2"),
        ((CAUSAL8, HALVES), {"stages": -1}, ValueError, "stages must be 0 or more, got -1"),
        (
            (CAUSAL8, HALVES),
            {"assignment": "best"},
            ValueError,
            "assignment must be one of auto, owner, balanced, nearest, shared, zigzag, got 'best'",
        ),
        (
            (CAUSAL8, HALVES),
            {"team_size": 3},
            ValueError,
            "team_size must divide the 2 ranks and be at most the 32 query heads, got 3",
        ),
        (
            (CAUSAL8, HALVES),
            {"team_size": 2, "heads": (1, 1)},
            ValueError,
            "team_size must divide the 2 ranks and be at most the 1 query heads, got 2",
        ),
        (
            (CAUSAL8, HALVES),
            {"team_size": 2, "heads": (6, 4)},
            ValueError,
            "query heads must be a multiple of key heads to be assigned to 2 ranks, got 6 and 4",
        ),
        (
            (CAUSAL8, HALVES),
            {"team_size": 0},
            ValueError,
            "team_size must divide the 2 ranks and be at most the 32 query heads, got 0",
        ),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error) as info:
        make_plan(*arguments, **options)
    assert str(info.value) == message


def test_bytes_of_heads_that_the_plan_cannot_split():
    plan = make_plan(CAUSAL8, HALVES, team_size=2)
    for count in (plan.forward_bytes, plan.backward_bytes):
        with pytest.raises(ValueError, match="team_size must be 1 to 1, the query heads, got 2"):
            count(1, 1, 64, None, 2)


# ------------------------------------------------------------------------ speed

SPEED = runpy.run_path(
    str(Path(__file__).parents[3] / "examples/benchmark/parts/planning/plan_speed.py")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "documents", "limit_seconds"), [(64, 256, 0.025), (256, 4096, 0.150)]
)
def test_planning_is_fast(ranks, documents, limit_seconds):
    """Limits far above what `plan_speed.py` measures, for slow and busy machines."""
    made, part, hit = SPEED["measure"](ranks, documents)
    assert made <= limit_seconds and part <= limit_seconds and hit <= 0.001


def test_documents_of_the_speed_table_fill_the_sequence():
    mask = SPEED["packed_documents"](256)
    assert mask.q_len == SPEED["TOKENS"] and 200 < len(mask.slices) <= 256


# ------------------------------------------------------------------ no torch here

WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = None  # importing it is an error from here on
for name, path in {packages!r}:
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [path]
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
plan = make_plan(AttnMask.dense(64, causal=True), Layout.contiguous(64, 4))
print(sum(plan.rank(r).area for r in range(4)))
import customized_ops.ring_attention.core.plan.report.picture
assert "matplotlib" not in sys.modules  # before a picture is asked for
"""


def test_planning_needs_neither_torch_nor_matplotlib():
    """The packages' own __init__ files import the ops, hence torch, so empty ones stand in."""
    core = Path(plan_module.__file__).parent.parent
    packages = [
        ("customized_ops", str(core.parent.parent)),
        ("customized_ops.ring_attention", str(core.parent)),
    ]
    program = WITHOUT_TORCH.format(packages=packages)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{64 * 65 // 2}\n"


@pytest.mark.parametrize("heads", [(4, 8), (6, 4)])
def test_heads_that_make_no_groups_are_not_split_among_teams(heads: tuple[int, int]) -> None:
    layout = Layout.contiguous(4096, 8)
    plan = make_plan(AttnMask.causal(4096), layout, heads=heads, team_size=None)
    assert plan.team_size == 1 and plan.area.sum() == 4096 * 4097 // 2


@pytest.mark.parametrize(
    "ranks, tokens, heads, batch, times",
    [(8, 1024, (16, 16), 16, 2.1), (2, 1024, (32, 8), 16, 1.7)],
)
def test_other_plans_for_larger_batches(
    ranks: int, tokens: int, heads: tuple[int, int], batch: int, times: float
) -> None:
    """With as much to compute, starting calls is no longer what takes time."""
    mask, layout = (
        AttnMask.dense(ranks * tokens, causal=True),
        Layout.contiguous(ranks * tokens, ranks),
    )
    one, many = (make_plan(mask, layout, heads=heads, team_size=None, batch=n) for n in (1, batch))
    seconds = [
        sum(each.seconds for each in H200.passes(plan, *heads, 128 * batch, 128 * batch, 2))
        for plan in (one, many)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(times, abs=0.05)
    dims = {"head_dim": 64, "v_dim": 32, "batch": 2 * batch}
    request = make_plan(mask, layout, heads=heads, team_size=None, **dims).request
    assert request is not None
    assert request.head_dims == (128 * batch, 64 * batch)


def test_other_plans_for_wider_elements() -> None:
    """Links take longer and kernels do not, so for elements of 32 bits another plan is fastest."""
    mask, layout, heads = AttnMask.dense(16_384, causal=True), Layout.contiguous(16_384, 4), (32, 8)
    costs = CostModel(link_bytes=50e9)
    usual, narrow, wide = (
        make_plan(mask, layout, heads=heads, costs=costs, **given)
        for given in ({}, {"itemsize": 2}, {"itemsize": 4})
    )
    assert usual is narrow
    seconds = [
        sum(each.seconds for each in costs.passes(plan, *heads, 128, 128, 4))
        for plan in (narrow, wide)
    ]
    assert seconds[1] < 0.8 * seconds[0]
    with pytest.raises(ValueError, match="itemsize must be 1 byte or more, got 0"):
        make_plan(mask, layout, itemsize=0)


@pytest.mark.parametrize("wrong", [{"head_dim": 0}, {"v_dim": -1}, {"batch": 0}])
def test_wrong_head_dims(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="head dims times batch must be 1 or more"):
        make_plan(AttnMask.dense(8), Layout.contiguous(8, 2), **wrong)


def test_only_few_ranks_are_made_together() -> None:
    """A table of the moves of all ranks would be too large where these are many."""
    for ranks in (8, 9):
        plan = make_plan(AttnMask.causal(144), Layout.zigzag(144, ranks))
        for rank in (3, 1):
            plan.exchanges(rank)
        assert len(plan._exchanges) == (8 if ranks == 8 else 2)
