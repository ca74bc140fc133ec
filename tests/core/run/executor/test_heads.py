"""Heads in shares of teams, and in groups that arrive one after the other."""

from __future__ import annotations

import pytest
import torch
from executed import LAYOUTS, MASKS, SCALE, N, Shape, check, run

from customized_ops.ring_attention.core.kernels import Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan

from .executor_cases import CASES, SEED, global_and_local, slopes

# Heads that do not divide evenly, and key heads that several ranks of a team share.
SPLITS = {
    "6:3 in 2": ((6, 3), 2, 4),
    "4:1 in 2": ((4, 1), 2, 4),
    "4:1 in 4": ((4, 1), 4, 4),
    "8:2 in 4": ((8, 2), 4, 8),
    "5:5 in 2": ((5, 5), 2, 2),
    "5:5 in 3": ((5, 5), 3, 3),
    "6:2 in 3": ((6, 2), 3, 6),
    "12:4 in 8": ((12, 4), 8, 8),
}
over_splits = pytest.mark.parametrize(
    ("heads", "team_size", "ranks"), SPLITS.values(), ids=list(SPLITS)
)


@pytest.mark.covering(1)
@over_splits
@pytest.mark.parametrize("assignment", ["owner", "balanced", "nearest"])
@pytest.mark.parametrize("stages", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["causal", "global rows", "few queries"])
def test_heads_in_uneven_shares(name, stages, assignment, heads, team_size, ranks):
    masks = {"global rows": global_and_local(64, 2, 5), "few queries": AttnMask.dense(6, 90)}
    mask = masks.get(name, AttnMask.dense(N, causal=True))
    layouts = Layout.zigzag(mask.q_len, ranks), Layout.contiguous(mask.k_len, ranks)
    options = {"assignment": assignment, "team_size": team_size, "heads": heads}
    plan = make_plan(mask, *layouts, stages=stages, **options)
    check(plan, Shape(2, *heads).draw(mask))


@pytest.mark.covering(1)
@over_splits
@pytest.mark.parametrize("assignment", ["balanced", "nearest"])
def test_scoring_knows_the_heads_at_hand(assignment, heads, team_size, ranks):
    """Slopes and random numbers are those of the head, whoever computes it."""
    mask = global_and_local(64, 2, 5)
    layout = Layout.contiguous(64, ranks)
    options = {"assignment": assignment, "team_size": team_size, "heads": heads}
    plan = make_plan(mask, layout, **options)
    dropout = {"dropout_p": 0.4, "dropout_seed": SEED}
    scoring = Scoring(SCALE, alibi_slopes=slopes(2, heads[0]), **dropout)
    check(plan, Shape(2, *heads).draw(mask), scoring, kernel="reference")


# -------------------------------------------- keys that arrive in groups of heads

# Query heads and key heads, and groups of them: even, uneven, of one key head, all alike.
GROUPS = {"8:4 in 2": ((8, 4), 2), "6:3 in 2": ((6, 3), 2), "8:4 in 4": ((8, 4), 4)}
over_groups = pytest.mark.parametrize(("heads", "head_groups"), GROUPS.values(), ids=GROUPS)


@pytest.mark.covering(2)
@over_groups
@pytest.mark.parametrize("mask", ["full", "causal", "packed", "cross", "rows with no key"])
@pytest.mark.parametrize("layout", ["contiguous 2", "zigzag 3", "uneven"])
@pytest.mark.parametrize("stages", [0, 1, 2])
def test_keys_in_groups_of_heads(mask, layout, stages, heads, head_groups):
    mask, shape = MASKS[mask], Shape(1, *heads)
    options = {"heads": heads, "stages": stages, "head_groups": head_groups}
    plan = make_plan(mask, LAYOUTS[layout](mask.q_len), LAYOUTS[layout](mask.k_len), **options)
    assert plan.head_groups == (head_groups if plan.keys_move else 1)
    check(plan, shape.draw(mask))


@pytest.mark.thin(4)
@over_groups
@pytest.mark.parametrize("assignment", ["balanced", "nearest"])
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_groups_of_heads_where_rows_move(kernel, stages, assignment, heads, head_groups):
    for mask, q_layout, k_layout in (CASES["global rows, zigzag"], CASES["slices share rows"]):
        options = {"assignment": assignment, "heads": heads, "head_groups": head_groups}
        plan = make_plan(mask, q_layout, k_layout, stages=stages, **options)
        assert plan.rows_move and plan.head_groups == head_groups
        check(plan, Shape(2, *heads).draw(mask), kernel=kernel)


def test_a_plan_in_groups_serves_fewer_key_heads():
    mask = MASKS["causal"]
    plan = make_plan(mask, Layout.contiguous(N, 3), heads=(8, 8), head_groups=8)
    for heads in ((8, 8), (6, 3), (4, 1)):
        check(plan, Shape(1, *heads).draw(mask))


@pytest.mark.covering(1)
@over_groups
@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_move_the_bytes_of_the_whole(dtype, stages, heads, head_groups):
    shape, layout = Shape(2, *heads, d=8, e=5), Layout.from_sizes([0, 40, 10, 30])
    for mask in (AttnMask.varlen([0, 30, 37, 80], causal=True), global_and_local(80, 2, 6)):
        options = {"heads": heads, "head_groups": head_groups, "assignment": "balanced"}
        plan = make_plan(mask, layout, stages=stages, **options)
        _, traffic = run(plan, [t.to(dtype) for t in shape.draw(mask)])
        sizes = (*heads, shape.d, shape.e, dtype.itemsize)
        assert traffic.forward == (2 * plan.forward_bytes(*sizes)).tolist()
        assert traffic.backward == (2 * plan.backward_bytes(*sizes)).tolist()
