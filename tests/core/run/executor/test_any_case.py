"""Plans, shapes and scorings drawn at random, against dense attention."""

from __future__ import annotations

import pytest
import torch
from executed import PLAIN, SCALE, STRIDES, Shape, check
from hypothesis import event, given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.kernels import Scoring
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.choose.search import ASSIGNMENTS

from .executor_cases import global_and_local, layouts, masks, refuses, slopes


@st.composite
def masks_of_few_rows(draw) -> AttnMask:
    """Some rows or all attend many more keys than there are such rows: they go to the keys."""
    if draw(st.booleans()):
        tokens = draw(st.integers(32, 64))
        return global_and_local(tokens, draw(st.integers(1, 3)), draw(st.integers(0, 6)))
    return AttnMask.dense(draw(st.integers(1, 6)), draw(st.integers(30, 60)))


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@st.composite
def plans(draw) -> tuple[Plan, Shape]:
    group_size = draw(st.sampled_from([1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]))
    rows_move = group_size > 1 and draw(st.booleans())
    mask = draw(masks_of_few_rows() if rows_move else masks())
    q_layout = draw(layouts(mask.q_len, group_size))
    same = mask.q_len == mask.k_len and draw(st.booleans())
    k_layout = q_layout if same else draw(layouts(mask.k_len, group_size))
    team = draw(st.sampled_from(divisors(group_size)))
    kv_heads = draw(st.integers(1, 5))
    least = -(-team // kv_heads)  # query heads of a key head, so that each of a team has one
    shape = Shape(
        batch=draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.integers(least, max(least, 2))),
        d=draw(st.integers(1, 6)),
        e=draw(st.integers(1, 6)),
    )
    team_size = draw(st.sampled_from([team, team, None]))
    head_groups = draw(st.integers(1, kv_heads)) if team_size == 1 else None
    plan = make_plan(
        mask,
        q_layout,
        k_layout,
        assignment=draw(st.sampled_from(["nearest", "auto"] if rows_move else list(ASSIGNMENTS))),
        stages=draw(st.integers(0, 3)),
        heads=shape.heads,
        team_size=team_size,
        head_groups=head_groups,
    )
    event(f"groups of heads: {plan.head_groups}")
    event(f"ranks: {group_size}")
    event(f"ranks of a team: {plan.team_size}")
    event(f"shares differ: {shape.q_heads % plan.team_size > 0}")
    event(f"key heads are shared: {shape.kv_heads < plan.team_size}")
    event(f"rows move: {bool(plan.q_tokens().any())}, keys move: {bool(plan.kv_tokens().any())}")
    event(f"rows of several teams: {plan.shared_rows}, teams: {plan.team_size > 1}")
    return plan, shape


@st.composite
def scorings(draw, shape: Shape) -> Scoring:
    """Any mix of softcap, ALiBi and dropout, half of the time none."""
    if draw(st.booleans()):
        return PLAIN
    of_batch = draw(st.sampled_from([None, 1, shape.batch]))
    scoring = Scoring(
        SCALE,
        softcap=draw(st.sampled_from([0.0, 0.7])),
        alibi_slopes=None if of_batch is None else slopes(of_batch, shape.q_heads),
        dropout_p=draw(st.sampled_from([0.0, 0.25])),
        dropout_seed=torch.tensor([draw(st.integers(-(2**63), 2**63 - 1))]),
    )
    event(f"scoring: {', '.join(scoring.features) or 'plain'}")
    return scoring


@given(plans(), st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_case_equals_dense_attention(case, data):
    check_drawn(case, data)


@pytest.mark.slow
@given(plans(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_many_cases_equal_dense_attention(case, data):
    check_drawn(case, data)


def check_drawn(case, data):
    plan, shape = case
    scoring = data.draw(scorings(shape))
    tensors = shape.draw(plan.mask)
    able = [n for n in ("torch", "reference") if not refuses(n, tensors, scoring)]
    positions = None
    if scoring.alibi_slopes is not None and data.draw(st.booleans()):
        draw = torch.Generator().manual_seed(1)
        positions = torch.randint(-9, 60, (plan.mask.k_len,), generator=draw)
    check(
        plan,
        tensors,
        scoring,
        positions,
        kernel=data.draw(st.sampled_from(able)),
        strides=STRIDES[data.draw(st.sampled_from(sorted(STRIDES)))],
    )
