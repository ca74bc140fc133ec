"""Documents assigned whole, or split from both ends."""

import itertools

import numpy as np
import pytest
from benchmark.documents import document_bounds as document_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.kernels.window.lowering import lower
from customized_ops.ring_attention.core.layout import Layout, balance
from customized_ops.ring_attention.core.layout.documents.balance_documents import (
    CALL_PAIRS,
    ENOUGH,
    assign_documents,
)
from customized_ops.ring_attention.core.layout.documents.document_areas import (
    DocumentAreas,
    document_bounds,
)
from customized_ops.ring_attention.core.layout.documents.split_documents import EVEN as SPLIT_EVEN
from customized_ops.ring_attention.core.layout.documents.split_documents import split_documents
from customized_ops.ring_attention.core.layout.documents.whole_documents import (
    AS_EVEN,
    least_area,
    whole_documents,
)
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.assign.work import area_per_team, owned
from customized_ops.ring_attention.core.plan.bounds import row_sums

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=10)
some = settings(max_examples=30, deadline=None, derandomize=True)


def packed(tokens: list[int]) -> AttnMask:
    return AttnMask.varlen([0, *itertools.accumulate(tokens)], causal=True)


def mixed(total: int, longest: int, seed: int) -> AttnMask:
    """Many short documents and a few long ones."""
    draw, tokens = np.random.default_rng(seed), []
    while sum(tokens) < total:
        length = int(draw.lognormal(np.log(longest / 16), 1.3))
        tokens.append(min(max(length, 1), longest, total - sum(tokens)))
    return packed(tokens)


def loads(mask: AttnMask, layout: Layout) -> np.ndarray:
    """Pairs of each rank's rows."""
    rows = row_sums(mask.slices, mask.q_len)
    return np.array([rows[layout.positions(r)].sum() for r in range(layout.group_size)])


def sizes_of(mask: AttnMask, group_size: int) -> np.ndarray:
    return np.array(Layout.contiguous(mask.q_len, group_size).sizes)


def crossing(mask: AttnMask, layout: Layout) -> int:
    return int(make_plan(mask, layout, assignment="owner").kv_tokens()[:, 1].sum())


@given(st.lists(st.tuples(*[st.integers(0, 15)] * 4), max_size=5))
@some
def test_documents_attend_themselves_only(corners):
    seen = np.zeros((16, 16), dtype=bool)
    rows = []
    for q0, q1, k0, k1 in corners:
        if q0 < q1 and k0 < k1 and not seen[q0:q1, k0:k1].any():
            seen[q0:q1, k0:k1] = True
            rows.append((q0, q1, k0, k1, -99, 99))
    bounds = document_bounds(AttnMask.from_slices(rows, 16, 16).slices, 16).tolist()
    # A token in no slice attends nothing; such tokens side by side stay together.
    touched = seen.any(axis=0) | seen.any(axis=1)
    for cut in range(1, 16):
        apart = not (seen[:cut, cut:].any() or seen[cut:, :cut].any())
        hull = any(min(q0, k0) < cut < max(q1, k1) for q0, q1, k0, k1, *_ in rows)
        assert (cut in bounds) == (not hull and (touched[cut - 1] or touched[cut]))
        assert cut not in bounds or apart
    assert bounds[0] == 0 and bounds[-1] == 16


@given(lengths)
@some
def test_two_ranks_get_the_best_assignment_of_few_documents(tokens):
    """Against all ways to give rank 0 half of the tokens in whole documents."""
    mask, half = packed(tokens), -(-sum(tokens) // 2)
    area = [n * (n + 1) // 2 for n in tokens]
    best = min(
        (
            max(sum(area[n] for n in chosen), sum(area) - sum(area[n] for n in chosen))
            for size in range(len(tokens))
            for chosen in itertools.combinations(range(len(tokens)), size)
            if sum(tokens[n] for n in chosen) == half
        ),
        default=None,
    )
    found = assign_documents([(mask.slices, 1.0)], mask.q_len, 2)
    if found is None or len(tokens) < 4:
        too_large = 2 * max(area, default=0) > AS_EVEN * sum(area) or max(tokens) > sum(tokens) // 2
        assert best is None or too_large or len(tokens) < 4
        return
    layout = Layout(found.table, 2)
    assert layout.sizes == Layout.contiguous(mask.q_len, 2).sizes
    assert found.imbalance == pytest.approx(loads(mask, layout).max() * 2 / mask.area)
    if crossing(mask, layout) == 0:
        assert best is not None
        assert loads(mask, layout).max() <= max(best, AS_EVEN * mask.area / 2) + 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("group_size", "total"), [(2, 16384), (2, 65536), (4, 65536), (4, 131072)])
def test_packed_documents_are_even_and_take_a_call_or_two(group_size, total, seed):
    mask = mixed(total, total // 4, seed)
    layout = Layout.balanced(mask, group_size)
    assert layout.sizes == (total // group_size,) * group_size
    spare = max((SPLIT_EVEN - 1) * mask.area / group_size, CALL_PAIRS)
    assert loads(mask, layout).max() <= mask.area / group_size + spare
    assert crossing(mask, layout) <= 0.75 * crossing(mask, Layout.striped(total, group_size, 512))
    plan = make_plan(mask, layout, assignment="owner", stages=1)
    for rank in range(group_size):
        calls = [len(lower(stage.own)) for stage in plan.rank(rank).stages]
        assert calls[0] == 1 and sum(calls[1:]) <= 2 * group_size - 3


def test_a_document_larger_than_a_share_is_split_from_both_ends():
    """Of 4096 tokens, rank 0 holds the first and the last 1024."""
    layout = Layout.balanced(packed([4096, 512, 512, 512, 512]), 2)
    front = layout.positions(0)[:2048]
    assert front.tolist() == [*range(1024), *range(3072, 4096)]
    assert layout.positions(1)[:2048].tolist() == list(range(1024, 3072))
    assert layout.sizes == (3072, 3072)


def test_split_documents_lie_first():
    """So that the rows that attend others' keys are next to one another."""
    layout = Layout.balanced(packed([512, 512, 4096, 512, 512]), 2)
    assert layout.positions(1)[:2048].tolist() == list(range(2048, 4096))
    assert layout.ranges[1][1:] and layout.ranges[1][1][0] in (0, 512, 5120, 5632)


@pytest.mark.parametrize(
    ("mask", "group_size"),
    [
        (AttnMask.causal(64), 2),
        (packed([8, 8, 8]), 2),
        (packed([7] * 9), 2),  # no whole documents make half of the tokens
    ],
)
def test_where_documents_cannot_stay_whole(mask, group_size):
    sizes = sizes_of(mask, group_size)
    assert (
        whole_documents(DocumentAreas.of([(mask.slices, 1.0)], mask.q_len), sizes, AS_EVEN) is None
    )
    assert assign_documents([(mask.slices, 1.0)], mask.q_len, group_size).good


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
@some
def test_the_least_area_is_a_bound(tokens, group_size):
    """Of all ways to lay whole documents on ranks of equal tokens."""
    mask, size = packed(tokens), sum(tokens) // group_size
    documents = DocumentAreas.of([(mask.slices, 1.0)], mask.q_len)
    bound = least_area(documents, size)
    for ranks in itertools.product(range(group_size), repeat=len(tokens)):
        if (np.bincount(ranks, documents.tokens, minlength=group_size) == size).all():
            assert bound <= np.bincount(ranks, documents.area).max() * (1 + 1e-9)


@pytest.mark.parametrize(
    "mask", [AttnMask.from_slices([], 64, 64), AttnMask.dense(0)], ids=["nothing", "no tokens"]
)
def test_where_nothing_is_attended(mask):
    assert assign_documents([(mask.slices, 1.0)], mask.q_len, 2) is None
    assert Layout.balanced(mask, 2) == Layout.contiguous(mask.q_len, 2)


drawn_documents = given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any),
    st.integers(1, 9),
    st.sampled_from([{"causal": True}, {}, {"causal": True, "window": (7, 0)}]),
)


@drawn_documents
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_rank_gets_its_tokens(tokens, group_size, kind):
    check_tokens(tokens, group_size, kind)


@pytest.mark.slow
@drawn_documents
@settings(max_examples=300, deadline=None, derandomize=True)
def test_each_rank_gets_its_tokens_of_many(tokens, group_size, kind):
    check_tokens(tokens, group_size, kind)


def check_tokens(tokens, group_size, kind):
    """Documents of no token, of one, one alone, fewer than ranks, longer than half of all."""
    mask = AttnMask.varlen([0, *itertools.accumulate(tokens)], **kind)
    layout = Layout.balanced(mask, group_size)
    assert sum(layout.sizes) == sum(tokens)
    table = split_documents(
        DocumentAreas.of([(mask.slices, 1.0)], mask.q_len), sizes_of(mask, group_size)
    )
    assert Layout(table, group_size).sizes == Layout.contiguous(mask.q_len, group_size).sizes


@pytest.mark.parametrize(
    ("tokens", "group_size", "draws"), [(1 << 17, 8, 60), (1 << 19, 64, 12), (1 << 21, 256, 3)]
)
def test_real_lengths_are_even_and_few_keys_move(tokens, group_size, draws):
    """Lengths of a long-context corpus: within 2% for nearly all draws, and 3% for each."""
    uneven = []
    for seed in range(draws):
        mask = AttnMask.varlen(document_lengths(tokens, seed), causal=True)
        documents = DocumentAreas.of([(mask.slices, 1.0)], tokens)
        sizes = np.full(group_size, tokens // group_size)
        table = split_documents(documents, sizes)
        layout = Layout(table, group_size)
        assert layout.sizes == tuple(sizes)
        uneven.append(loads(mask, layout).max() * group_size / mask.area)
        # The line has a cut or two for each rank, and few documents are split besides.
        held = np.searchsorted(documents.bounds, table[:, 1], side="right") - 1
        ranks_of = np.bincount(np.unique(held * group_size + table[:, 0]) // group_size)
        assert (ranks_of - 1).sum() <= 2 * group_size
    assert np.quantile(uneven, 0.9) <= 1.021 and max(uneven) <= 1.03


def test_weights_count():
    """What is even for the sum of two masks is not for one of them."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(100, 2000, 30).tolist()
    full = AttnMask.varlen([0, *itertools.accumulate(tokens)])
    window = AttnMask.varlen([0, *itertools.accumulate(tokens)], causal=True, window=(64, 0))
    layout = Layout.balanced([(full, 1), (window, 3)], 2)
    both = loads(full, layout) + 3 * loads(window, layout)
    assert both.max() - both.mean() <= max((AS_EVEN - 1) * both.mean(), 4 * CALL_PAIRS)


@pytest.mark.parametrize(
    ("bounds", "ranks"),
    [([0, 1000, 2000], 2), ([0, 1000, 2000, 3000], 3), ([0, 999, 2000], 2), ([0, 100, 200], 1)],
)
def test_as_many_documents_as_ranks_stay_where_they_are(bounds: list[int], ranks: int) -> None:
    mask = AttnMask.varlen(bounds, causal=True)
    assert Layout.balanced(mask, ranks) == Layout.contiguous(bounds[-1], ranks)


def test_contiguous_is_no_answer_where_work_is_uneven() -> None:
    mask = AttnMask.varlen([0, 1500, 2000], causal=True)
    assert Layout.balanced(mask, 2) != Layout.contiguous(2000, 2)


@pytest.mark.parametrize("ranks, tokens", [(8, 1 << 17), (64, 1 << 19)])
@pytest.mark.parametrize("window", [512, 4096])
def test_windows_need_no_search(
    ranks: int, tokens: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document longer than its window is cut in two where its rows stop to gain keys."""
    monkeypatch.setattr(balance, "assign_masks", None)
    for seed in range(6):
        bounds = document_lengths(tokens, seed)
        mask = AttnMask.varlen(bounds, causal=True, window=(window - 1, 0))
        layout = Layout.balanced(mask, ranks)
        assert set(layout.sizes) == {tokens // ranks}
        load = area_per_team(owned(mask.slices, layout, 1), ranks)
        calls = 1 + CALL_PAIRS * ranks / mask.area  # uneven, but with a kernel call less
        assert load.max() / load.mean() <= max(ENOUGH, calls)
