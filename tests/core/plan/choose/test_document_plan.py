"""Plans of packed documents by construction: what they are, how even, and beside the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmark.documents import document_bounds

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import moves
from customized_ops.ring_attention.core.plan.assign.document_work import evened_documents
from customized_ops.ring_attention.core.plan.assign.work import TEAM, area_per_team, owned
from customized_ops.ring_attention.core.plan.choose import document_plan, search
from customized_ops.ring_attention.core.plan.choose.document_plan import (
    ALIKE_SECONDS,
    is_of_documents,
)
from customized_ops.ring_attention.core.plan.choose.plan_request import PlanRequest
from customized_ops.ring_attention.core.plan.choose.rates import Rates
from customized_ops.ring_attention.core.plan.cost_model import H200, CostModel
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.moves import LENGTHS
from customized_ops.ring_attention.core.plan.plan_value import PlanValue

from ..plan_cases import painted

KINDS = [{"causal": True}, {}, {"causal": True, "window": (9, 0)}, {"window": (2, 5)}]


def request(mask: AttnMask, layout: Layout, costs: CostModel = H200) -> PlanRequest:
    """As a call asks, of 32 query and 8 key heads."""
    return PlanRequest(mask, layout, layout, "auto", None, (32, 8), None, None, costs)


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_given_once_and_work_is_even(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 60, draw.integers(2, 12))
    lengths[draw.integers(len(lengths))] += int(draw.integers(0, 200))
    mask = AttnMask.varlen(np.append(0, np.cumsum(lengths)), **KINDS[seed % len(KINDS)])
    team_size = int(draw.integers(1, 4))
    teams = int(draw.integers(2, 6))
    cuts = np.sort(draw.integers(0, mask.q_len + 1, teams * team_size - 1))
    layout = Layout.from_sizes(np.diff([0, *cuts, mask.q_len]))
    home = owned(mask.slices, layout, team_size)
    work = evened_documents(home, mask.slices, layout, team_size, 0.0)
    pairs = painted(work[:, :TEAM], mask.q_len, mask.k_len)
    assert (pairs == mask.to_dense()).all(), "each pair once"
    area = area_per_team(work, teams)
    most_keys = mask.to_dense().sum(axis=1).max()
    # A stretch ends at a whole row; a team has two ends of its own line, and one for each giver.
    assert area.max() <= 1.01 * area.mean() + 4 * most_keys


def test_no_less_than_a_kernel_takes_to_start_is_divided() -> None:
    mask = AttnMask.varlen([0, 4000, 4100, 4200, 8192], causal=True)
    layout = Layout.contiguous(8192, 4)
    home = owned(mask.slices, layout, 1)
    most = area_per_team(home, 4).max()
    assert evened_documents(home, mask.slices, layout, 1, float(most)) is home
    work = evened_documents(home, mask.slices, layout, 1, 0.9 * most)
    assert area_per_team(work, 4).max() == pytest.approx(0.9 * most, rel=0.02)
    assert work[:, TEAM].max() == 3 and len(work) <= len(home) + 4


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (AttnMask.varlen([0, 8, 16], causal=True), True),
        (AttnMask.varlen([0, 8, 16], window=(2, 2)), True),
        (AttnMask.varlen([0, 0, 16], causal=True), False),  # one document
        (AttnMask.causal(16), False),
        (AttnMask.varlen([0, 8, 16], causal=True, window=(2, 0), global_tokens=1), False),
        (AttnMask.streaming(16, 4, 1), False),
        (AttnMask.from_slices([], 16, 16), False),
    ],
)
def test_what_counts_as_documents(mask: AttnMask, expected: bool) -> None:
    layout = Layout.contiguous(16, 2)
    assert is_of_documents(request(mask, layout)) == expected
    other = PlanRequest(mask, layout, Layout.zigzag(16, 2), "auto", None, (32, 8), None, None, H200)
    assert not is_of_documents(other)


@pytest.mark.parametrize("name", ["balanced", "contiguous"])
@pytest.mark.parametrize(
    ("ranks", "tokens"), [(2, 1 << 15), (4, 1 << 17), (8, 1 << 17), (64, 1 << 19)]
)
def test_it_is_as_good_as_the_search_and_does_not_search(
    ranks: int, tokens: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted times of both passes, beside the fastest of the search's candidates."""
    rates = Rates(H200, Sizes(32, 8, 128, 128, 2))
    searched = search.searched_plan
    for seed in range(3):
        mask = AttnMask.varlen(document_bounds(tokens, seed), causal=True)
        layout = Layout.contiguous(tokens, ranks)
        if name == "balanced":
            layout = Layout.balanced(mask, ranks)
        asked = request(mask, layout)
        best = searched(asked, rates)
        with monkeypatch.context() as patched:
            patched.setattr(search, "searched_plan", None)
            plan = search.best_plan(asked)
        more = ALIKE_SECONDS * plan.rounded  # so that it is launched as those of other documents
        assert rates.seconds(plan) <= max(1.02 * rates.seconds(best), rates.seconds(best) + more)
        if name == "balanced":
            assert (plan.kv_tokens() == best.kv_tokens()).all() and not plan.rows_move
        elif ranks > 2:
            assert plan.imbalance(32, 8) <= 1.02


def test_of_plans_that_are_as_fast_one_of_even_work_is_taken() -> None:
    """One document is most of the tokens, and ranks hold its keys next to one another: a plan that
    spares their links and loads ranks with 1.6 times the mean would take as long."""
    tokens, ranks = 1 << 21, 256
    mask = AttnMask.varlen(document_bounds(tokens, 24), causal=True)
    asked = request(mask, Layout.contiguous(tokens, ranks))
    rates = Rates(H200, Sizes(32, 8, 128, 128, 2))
    plan = search.searched_plan(asked, rates)
    assert plan.imbalance(32, 8) <= 1.02
    others = [replace(asked, team_size=size) for size in (8, 32)]
    fastest = min(rates.seconds(search.searched_plan(each, rates)) for each in others)
    assert rates.seconds(plan) <= 1.05 * fastest


def test_where_links_are_too_slow_the_search_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = AttnMask.varlen(document_bounds(1 << 17, 5002), causal=True)
    layout = Layout.contiguous(1 << 17, 8)
    asked = request(mask, layout, CostModel(link_bytes=50e9, step_seconds=48e-6))
    rates = Rates(asked.costs, asked.sizes)
    best = rates.seconds(search.searched_plan(asked, rates))
    assert rates.seconds(search.best_plan(asked)) <= best
    monkeypatch.setattr(search, "is_good", lambda *_: True)
    assert rates.seconds(search.best_plan(asked)) > 1.2 * best
    monkeypatch.undo()
    monkeypatch.setattr(search, "SEARCHED_RANKS", 4)  # which takes too long for so many
    assert rates.seconds(search.best_plan(asked)) > 1.2 * best


def gathered(seed: int, ranks: int = 2, **options: Any) -> PlanValue:
    """The plan of short contiguous shards."""
    mask = AttnMask.varlen(document_bounds(1 << 14, seed), causal=True)
    asked = replace(request(mask, Layout.contiguous(1 << 14, ranks)), **options)
    return search.best_plan(asked)


def test_short_shards_gather_ranges_of_few_lengths() -> None:
    rates, lengths = Rates(H200, Sizes(32, 8, 128, 128, 2)), set()
    for seed in range(40):
        plan = gathered(seed)
        if not plan.rounded:
            assert plan.rows_move or not plan.keys_move
            continue
        exact = plan.variant(rounded=False)
        assert rates.seconds(plan) - rates.seconds(exact) <= ALIKE_SECONDS
        received, needed = int(plan.kv_tokens()[1, 1]), int(exact.kv_tokens()[1, 1])
        lengths.add((received, needed))
        assert needed <= received < needed + (1 << 14) // 2 / LENGTHS
    few, many = ({each[n] for each in lengths} for n in (0, 1))
    assert len(few) <= LENGTHS < len(many)


def test_passes_are_launched_alike_where_that_takes_little_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys that would come in a stage may be gathered. Not where that takes much longer once the
    passes are replayed, as where rows would be given away, and not in long passes."""
    rates = Rates(H200, Sizes(32, 8, 128, 128, 2))
    soon = Rates(replace(H200, call_seconds=20e-6), rates.sizes)
    kinds = set()
    for seed, tokens in ((n, 1 << bits) for n in range(40) for bits in (14, 15, 17)):
        mask = AttnMask.varlen(document_bounds(tokens, seed), causal=True)
        asked = request(mask, Layout.contiguous(tokens, 2))
        plan = search.best_plan(asked)
        with monkeypatch.context() as patched:
            patched.setattr(document_plan, "_launched_alike", lambda plan, *_: plan)
            other = search.best_plan(asked)
        if plan.rounded:
            assert plan.is_gather and not plan.rows_move and rates.seconds(other) < 2e-3
            extra = [each.seconds(plan) - each.seconds(other) for each in (rates, soon)]
            assert max(extra) <= ALIKE_SECONDS
        kind = "rows" if other.rows_move else "gathered" if other.gathered else "in a stage"
        kinds.add((tokens, kind, plan.rounded))
    short, middle, long = 1 << 14, 1 << 15, 1 << 17
    assert {(short, "gathered", True), (short, "in a stage", True)} <= kinds
    assert {(middle, "in a stage", True), (middle, "in a stage", False)} <= kinds
    assert {(n, "rows") for n in (short, middle, long)} <= {kind[:2] for kind in kinds}
    assert not {kind for kind in kinds if kind[1] == "rows" and kind[2]}
    assert not {kind for kind in kinds if kind[0] == long and kind[2]}


def test_keys_of_a_document_that_is_cut_are_gathered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they would else come in a stage."""
    gathered = set()
    for seed in range(80):
        mask = AttnMask.varlen(document_bounds(1 << 14, seed), causal=True)
        asked = request(mask, Layout.balanced(mask, 2))
        plan = search.best_plan(asked)
        with monkeypatch.context() as patched:
            patched.setattr(document_plan, "_launched_alike", lambda plan, *_: plan)
            other = search.best_plan(asked)
        if other.keys_move and other.variant(steps=0).own_follow:
            assert plan.own_follow and not plan.rounded
            gathered.add(other.gathered)
    assert gathered == {False, True}


@pytest.mark.parametrize("calls", [200e-6, 20e-6], ids=["anew", "replayed"])
def test_the_little_that_passes_launched_alike_may_take_longer(
    calls: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the host launches passes anew, and as it replays them."""
    mask = AttnMask.varlen(document_bounds(1 << 14, 4), causal=True)
    asked = request(mask, Layout.contiguous(1 << 14, 2))
    plan, seconds = search.best_plan(asked), Rates.seconds
    assert plan.rounded

    def longer(rates: Rates, of: PlanValue) -> float:
        more = of.rounded and rates.costs.call_seconds == calls
        return seconds(rates, of) + 2 * ALIKE_SECONDS * more

    monkeypatch.setattr(Rates, "seconds", longer)
    assert not search.best_plan(asked).rounded
    monkeypatch.setattr(document_plan, "ALIKE_SECONDS", 1.0)
    assert search.best_plan(asked).rounded
    monkeypatch.setattr(document_plan, "SHORT_SECONDS", 1e-3)
    assert not search.best_plan(asked).rounded


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 0},
        {"ranks": 16},
        {"costs": CostModel.over("2x1")},
        {"costs": replace(CostModel.over("2x1"), one_sided=True)},
        {"costs": replace(H200, one_sided=False)},
        {"costs": replace(H200, held_shards=1.0)},
        {"head_groups": 2},
    ],
    ids=["stages", "ranks", "hosts", "one side", "messages", "held keys", "groups of heads"],
)
def test_where_keys_are_those_that_are_needed(options: dict[str, Any]) -> None:
    """Where somebody says how keys arrive, and where passes do not share tapes."""
    assert gathered(0).rounded and not gathered(0, **options).rounded


def test_ranges_grow_away_from_a_rank_s_own_tokens() -> None:
    layout = Layout.contiguous(160, 4)
    needed = [(0, 0, 73), (1, 33, 80), (2, 80, 120), (3, 3, 160)]
    found = moves.rounded(np.array(needed), layout).tolist()
    assert found == [[0, 0, 80], [1, 32, 80], [2, 80, 120], [3, 0, 160]]
    assert moves.rounded(np.array([(0, 0, 157)]), Layout.contiguous(158, 2)).tolist() == [
        [0, 0, 158]
    ]


def test_a_rank_with_two_pieces_has_no_shard() -> None:
    mask = AttnMask.varlen([0, 900, 1900, 2500, 3000], causal=True)
    pieces = [[(0, 1000), (2000, 3000)], [(1000, 2000)], []]
    plan = search.best_plan(request(mask, Layout.from_ranges(pieces)))
    assert plan.keys_move and not plan.rounded


def test_a_variant_knows_again_which_keys_move() -> None:
    plan = gathered(0).variant(rounded=False)
    plan.exchanges(0), plan.kv_tokens(), plan.area
    longer, new = plan.variant(rounded=True), gathered(0)
    assert longer.kv_needed.tolist() == new.kv_needed.tolist() != plan.kv_needed.tolist()
    assert longer.kv_tokens().tolist() == new.kv_tokens().tolist()
