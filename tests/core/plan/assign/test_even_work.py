"""Work that is shared and evened out."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import K0, K1, Q0, Q1, areas, normalise
from customized_ops.ring_attention.core.plan.assign import even_work
from customized_ops.ring_attention.core.plan.assign.even_work import WORK_TOLERANCE, evened, shared
from customized_ops.ring_attention.core.plan.assign.work import TEAM, area_per_team, nearest, owned

from .work_cases import global_and_local, many, row_team

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
