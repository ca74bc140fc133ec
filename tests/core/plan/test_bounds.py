import itertools
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import bounds, make_plan
from customized_ops.ring_attention.core.plan.bounds import least_cost, lines, lower_bounds, row_sums
from customized_ops.ring_attention.core.plan.heads import Sizes

from .plan_cases import layouts

masks = st.one_of(
    st.builds(
        AttnMask.dense,
        st.integers(0, 40),
        st.integers(0, 40),
        causal=st.booleans(),
        window=st.tuples(st.integers(-1, 12), st.integers(-1, 12)),
    ),
    st.builds(
        lambda lengths, causal: AttnMask.varlen(np.cumsum([0, *lengths]), causal=causal),
        st.lists(st.integers(0, 15), max_size=5),
        st.booleans(),
    ),
    st.builds(
        lambda n, sink, window: AttnMask.from_slices(
            [(0, n, 0, min(sink, n), -99, 0), (0, n, min(sink, n), n, -window, 0)], n, n
        ),
        st.integers(0, 40),
        st.integers(0, 5),
        st.integers(0, 12),
    ),
)


def sums(mask: AttnMask) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of each row and of each key, from the dense mask."""
    dense = mask.to_dense()
    return dense.sum(axis=1), dense.sum(axis=0)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(deadline=None, derandomize=True)
@given(masks)
def test_sums_of_lines_are_those_of_the_dense_mask(mask):
    row, key = sums(mask)
    assert row_sums(mask.slices, mask.q_len).tolist() == row.tolist()
    assert bounds.key_sums(mask.slices, mask.k_len).tolist() == key.tolist()


@settings(deadline=None, derandomize=True)
@given(masks)
def test_most_and_fewest_are_what_they_say(mask):
    for side, pairs, length in zip(lines(mask), sums(mask), (mask.k_len, mask.q_len), strict=True):
        largest = np.sort(pairs)[::-1]
        for cap in range(length + 1):
            most = [int(np.minimum(largest[:n], cap).sum()) for n in range(side.count + 1)]
            counts = np.arange(side.count + 1)
            assert side.most(counts, np.full_like(counts, cap)).tolist() == most
            for wanted in {1, 2, most[-1] // 2 + 1, most[-1], most[-1] + 1} - {0}:
                enough = [n for n, pairs in enumerate(most) if pairs >= wanted]
                least = enough[0] if enough else side.count + 1
                assert side.fewest(column(wanted), column(cap)).tolist() == [least]


def cheapest_by_definition(mask, pairs, rows_held, keys_held, row_cost, key_cost) -> int:
    """least_cost without the search."""
    row, key = (np.sort(s)[::-1] for s in sums(mask))
    return min(
        row_cost * max(0, r - rows_held) + key_cost * max(0, c - keys_held)
        for r in range(mask.q_len + 1)
        for c in range(mask.k_len + 1)
        if min(np.minimum(row[:r], c).sum(), np.minimum(key[:c], r).sum()) >= pairs
    )


costs = st.integers(0, 9)


@settings(deadline=None, derandomize=True)
@given(masks, st.floats(0, 1), st.integers(0, 40), st.integers(0, 45), costs, costs)
def test_search_finds_the_minimum(mask, share, rows_held, keys_held, row_cost, key_cost):
    pairs = round(share * mask.area)
    rest = rows_held, keys_held
    got = least_cost(*lines(mask), *(column(n) for n in (pairs, *rest)), row_cost, key_cost)
    assert got.tolist() == [cheapest_by_definition(mask, pairs, *rest, row_cost, key_cost)]


@pytest.mark.parametrize("most", [0, 50, 1000])
def test_a_search_cut_short_gives_a_bound_still(monkeypatch, most):
    mask = AttnMask.dense(3000, causal=True)
    case = column(*(mask.area // n for n in (2, 4, 9))), column(*[700] * 3), column(*[500] * 3)
    exact = least_cost(*lines(mask), *case, 5, 3)
    monkeypatch.setattr(bounds, "MAX_CELLS", most)
    short = least_cost(*lines(mask), *case, 5, 3)
    assert (short <= exact).all() and (short >= 0).all()
    assert (short < exact).any() == (most < 1000)


SMALL = {
    "full": AttnMask.dense(3, 4),
    "causal": AttnMask.dense(4, causal=True),
    "window": AttnMask.dense(4, window=(1, 1)),
    "packed": AttnMask.varlen([0, 1, 4], causal=True),
    "sink": AttnMask.from_slices([(0, 5, 0, 1, -9, 0), (0, 5, 1, 5, -1, 0)], 5, 5),
}


@pytest.mark.parametrize("mask", SMALL.values(), ids=SMALL)
def test_no_set_of_pairs_costs_less(mask):
    """All sets of pairs that a rank may compute, in every layout that suits them best."""
    row, key = np.nonzero(mask.to_dense())
    cheapest: dict[tuple[int, int, int], int] = {}
    all_held = list(itertools.product(range(mask.q_len + 1), range(mask.k_len + 1)))
    seen = set()
    for chosen in itertools.product([False, True], repeat=len(row)):
        which = list(chosen)
        seen.add((sum(which), len(set(row[which])), len(set(key[which]))))
    for (pairs, rows, keys), (rows_held, keys_held) in itertools.product(seen, all_held):
        cost = 5 * max(0, rows - rows_held) + 3 * max(0, keys - keys_held)
        case = pairs, rows_held, keys_held
        cheapest[case] = min(cost, cheapest.get(case, cost))
    bound = least_cost(*lines(mask), *np.array(list(cheapest)).T, 5, 3)
    reached = np.array(list(cheapest.values()))
    assert (bound <= reached).all()
    assert (bound == reached).mean() > 0.6, "a bound of 0 would be one, too"


def test_a_rectangle_is_reached_exactly():
    """Under a full mask R x C pairs need R rows and C keys."""
    got = least_cost(*lines(AttnMask.dense(30)), column(200, 1), column(4, 1), column(3, 1), 1, 1)
    fewest = min(r + -(-200 // r) for r in range(7, 31))
    assert got.tolist() == [fewest - 7, 0]


@settings(deadline=None, derandomize=True)
@given(masks, st.integers(1, 9), costs, costs)
def test_never_below_the_bound_by_squares(mask, parts, row_cost, key_cost):
    pairs, rows, keys = mask.area // parts, mask.q_len // parts, mask.k_len // parts
    case = column(pairs), column(rows), column(keys)
    (got,) = least_cost(*lines(mask), *case, row_cost, key_cost)
    # The least of a R + b C with R C >= A, by the means' inequality.
    squares = 2 * sqrt(row_cost * key_cost * pairs) - row_cost * rows - key_cost * keys
    assert got >= squares - 1e-9


def test_narrow_masks_have_bounds_where_squares_give_none():
    """With 32 pairs a line, 1/4 of the pairs takes 1/4 of the rows and of the keys."""
    mask = AttnMask.dense(4096, window=(31, 0))
    (got,) = least_cost(*lines(mask), column(mask.area // 4), column(512), column(512), 1, 1)
    assert 2 * sqrt(mask.area / 4) < 2 * 512
    assert 1000 < got <= 1024


@st.composite
def plans(draw):
    mask, ranks = draw(masks), draw(st.sampled_from([1, 2, 4, 6]))
    return make_plan(
        mask,
        draw(layouts(mask.q_len, ranks)),
        draw(layouts(mask.k_len, ranks)),
        assignment=draw(st.sampled_from(["auto", "owner", "balanced", "nearest", "zigzag"])),
        stages=draw(st.sampled_from([None, 1, 2])),
        team_size=draw(st.sampled_from([n for n in (1, 2, 3, 4) if ranks % n == 0])),
        heads=(4, 2),
    )


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    plans(),
    st.sampled_from([(4, 2), (5, 5), (6, 3), (5, 1)]),
    st.sampled_from([(64, 64, 2), (32, 8, 8), (8, 64, 4)]),
)
def test_no_plan_falls_below_its_bounds(plan, heads, dims):
    sizes = (*heads, *dims)
    least = lower_bounds(plan, Sizes.of(*sizes))
    received = plan.forward_bytes(*sizes)[:, 1]
    assert plan.area.max() >= least.pairs
    assert (received >= least.received).all()
    assert received.max() >= least.busiest
    assert received.sum() >= least.total >= least.received.sum()


def test_moved_is_a_bound_of_each_ranks_work():
    """A rank's foreign rows and keys, and the results that it sends home."""
    layout = Layout.contiguous(64, 4)
    plan = make_plan(AttnMask.dense(64, causal=True), layout, assignment="balanced")
    assert plan.q_tokens().sum() > 0
    got = lower_bounds(plan, Sizes.of(4, 2, 16, None, 2)).moved
    result = 4 * (16 * 2 + 4)
    made = plan.kv_tokens()[:, 1] * 2 * 32 * 2 + plan.q_tokens()[:, 1] * (4 * 16 * 2 + result)
    assert made.sum() == plan.forward_bytes(4, 2, 16, None, 2)[:, 1].sum()
    assert (made >= got).all() and got.min() > 0


def test_nothing_to_do_has_bounds_of_nothing():
    plan = make_plan(AttnMask.from_slices([], 3, 3), Layout.from_sizes([1, 2]))
    least = lower_bounds(plan, Sizes.of(1, 1, 1, None, 2))
    assert (least.pairs, least.total, least.busiest) == (0, 0, 0)
