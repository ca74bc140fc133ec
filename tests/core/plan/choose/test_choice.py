"""Which plan is taken: even, with few moves and calls, for these heads, ranks and links."""

import numpy as np
import pytest

from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.heads import largest_share

from ..assign.work_cases import global_and_local


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
        "global": global_and_local(tokens, 0, window=256),
    }[kind]
    layouts = Layout.contiguous(mask.q_len, 8), Layout.contiguous(mask.k_len, 8)
    auto, *others = (
        seconds_of(make_plan(mask, *layouts, assignment=a, team_size=team_size))
        for a in ("auto", "owner", "balanced", "nearest", "shared")
    )
    assert 0.95 * auto <= min(others)


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
