"""Prefix trees on ranks: even, in exact numbers of tokens, and with few keys of other ranks."""

from __future__ import annotations

import numpy as np
import pytest

from customized_ops.ring_attention import AttnMask, Layout, make_plan
from customized_ops.ring_attention.core.layout.documents import balance_documents, subtrees
from customized_ops.ring_attention.core.layout.layout_tables import even_bounds
from customized_ops.ring_attention.core.mask.prefix_trees import is_prefix_tree
from customized_ops.ring_attention.core.topology import Topology


def drawn(seed: int) -> AttnMask:
    """Prompts with rollouts that part now and again."""
    draw = np.random.default_rng(seed)
    parents: list[int] = []
    lengths: list[int] = []
    for _ in range(int(draw.integers(1, 5))):
        path: list[int] = []
        for _ in range(int(draw.integers(2, 40))):
            path = path[: int(draw.integers(min(len(path), 1), len(path) + 1))]
            parents.append(path[-1] if path else -1)
            path.append(len(lengths))
            lengths.append(int(draw.integers(1, 600)))
    return AttnMask.prefix_tree(parents, lengths)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_even_and_with_few_keys(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they move fewer keys than trees that are split as documents are, or by chunks."""
    masks = [drawn(seed) for seed in range(6)]
    plans = []
    for mask in masks:
        layout = Layout.balanced(mask, ranks)
        assert layout.sizes == Layout.contiguous(mask.q_len, ranks).sizes
        plans.append(make_plan(mask, layout, assignment="owner"))
        enough = 1 + balance_documents.CALL_PAIRS * ranks / mask.area
        assert plans[-1].area.max() <= max(1.05, enough) * plans[-1].area.mean()
    monkeypatch.setattr(balance_documents, "assign_subtrees", lambda *_: None)
    others = [make_plan(m, Layout.balanced(m, ranks), assignment="owner") for m in masks]
    keys, before = (sum(int(p.kv_tokens()[:, 1].sum()) for p in each) for each in (plans, others))
    assert keys < 0.95 * before, (keys, before)


def test_over_hosts_fewer_keys_cross() -> None:
    def into_hosts(mask: AttnMask, layout: Layout) -> int:
        table = layout.table.copy()
        table[:, 0] //= 4
        return int(subtrees.work_of_ranks(mask.slices, table, 3)[1].sum()) - mask.q_len

    masks = [drawn(seed) for seed in range(8)]
    one = sum(into_hosts(mask, Layout.balanced(mask, 12)) for mask in masks)
    hosts = Topology.parse("3x4", "hosts")
    two = sum(into_hosts(mask, Layout.balanced(mask, 12, topology=hosts)) for mask in masks)
    assert two < 0.8 * one, (one, two)


def test_a_prompt_is_shared_out_and_its_answers_stay_whole() -> None:
    mask = AttnMask.shared_prefix(8192, [2048] * 8)
    layout = Layout.balanced(mask, 2)
    plan = make_plan(mask, layout, assignment="owner")
    assert plan.area[0] == plan.area[1]
    assert plan.kv_tokens()[:, 1].tolist() == [4096, 4096]  # of the prompt, which both attend
    answers = {8192 + 2048 * n for n in range(8)}
    assert all({start for start, _ in own} & answers for own in layout.ranges)
    assert not answers & {stop for own in layout.ranges for _, stop in own if stop % 2048}


def test_figures_of_ranks_are_those_of_the_plan() -> None:
    mask = drawn(7)
    for layout in (Layout.zigzag(mask.q_len, 4), Layout.balanced(mask, 4)):
        plan = make_plan(mask, layout, assignment="owner")
        area, keys = subtrees.work_of_ranks(mask.slices, layout.table, 4)
        assert area.tolist() == plan.area.tolist()
        assert (keys - layout.sizes).tolist() == plan.kv_tokens()[:, 1].tolist()


def test_subtrees_that_are_small_stay_whole() -> None:
    """A prompt of two subtrees, of which one is too large."""
    mask = AttnMask.prefix_tree([-1, 0, 1, 1, 0, 4, 4], [10, 2, 3, 3, 20, 5, 9])
    assert subtrees.subtree_bounds(mask.slices, 52, 8).tolist() == [0, 10, 18, 38, 43, 52]
    assert subtrees.subtree_bounds(mask.slices, 52, 100).tolist() == [0, 52]


def test_what_is_a_prefix_tree() -> None:
    none = (
        AttnMask.causal(9),  # which zigzag suits
        AttnMask.varlen([0, 4, 9], causal=True),
        AttnMask.streaming(9, 2, 1),
        AttnMask.prefix_lm(9, 3),
        AttnMask.block_causal(9, 3),
        AttnMask.from_slices([], 4, 4),
    )
    assert not any(is_prefix_tree(mask.slices) for mask in none)
    assert is_prefix_tree(AttnMask.shared_prefix(2, [3, 4]).slices)
    sizes = np.diff(even_bounds(9, 2))
    assert subtrees.assign_subtrees(none[1].slices, 9, sizes, 9.0) is None
