"""Scoring knows the tokens and heads at hand."""

from __future__ import annotations

import pytest
import torch
from executed import MASKS, SCALE, N, Shape, check

from customized_ops.ring_attention.core.kernels import Scoring
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan

from .executor_cases import CASES, SEED, slopes

SCORINGS = {
    "softcap": Scoring(SCALE, softcap=0.8),
    "alibi": Scoring(SCALE, alibi_slopes=slopes(1, 4)),
    "alibi of each batch entry": Scoring(SCALE, alibi_slopes=slopes(2, 4)),
    "dropout": Scoring(SCALE, dropout_p=0.3, dropout_seed=SEED),
    "all": Scoring(SCALE, 1.5, slopes(2, 4), dropout_p=0.5, dropout_seed=SEED),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("assignment", ["balanced", "nearest"])
@pytest.mark.parametrize("team_size", [1, 2])
@pytest.mark.parametrize("stages", [0, 2])
def test_scoring_knows_the_tokens_at_hand(scoring, assignment, team_size, stages):
    """Distances and random numbers go by global places, whoever computes them."""
    for name in ("few queries, other layouts", "global rows"):
        mask, q_layout, k_layout = CASES[name]
        options = {"assignment": assignment, "team_size": team_size, "heads": (4, 2)}
        plan = make_plan(mask, q_layout, k_layout, stages=stages, **options)
        assert plan.shared_rows == (assignment == "nearest")
        check(plan, Shape().draw(mask), scoring, kernel="reference")


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("team_size", [1, 4])
def test_alibi_from_given_positions(kernel, team_size):
    """Keys may stand anywhere, as positions that start again in each document do."""
    mask = AttnMask.varlen([0, 13, 40], [0, 20, 50])
    positions = torch.cat([torch.arange(20) - 7, torch.arange(30) + 10])
    layouts = Layout.zigzag(40, 4), Layout.contiguous(50, 4)
    plan = make_plan(mask, *layouts, stages=1, heads=(8, 4), team_size=team_size)
    scoring = Scoring(SCALE, alibi_slopes=slopes(2, 8))
    tensors = Shape(q_heads=8, kv_heads=4).draw(mask)
    check(plan, tensors, scoring, positions, kernel=kernel)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("stages", [0, 1])
def test_scoring_knows_the_heads_of_a_group(scoring, stages):
    """Slopes and random numbers are those of the head in the whole."""
    mask, heads = MASKS["causal"], (4, 2)
    plan = make_plan(mask, Layout.zigzag(N, 3), heads=heads, stages=stages, head_groups=2)
    check(plan, Shape(2, *heads).draw(mask), scoring, kernel="reference")
