"""What ``make_plan`` and plans refuse."""

import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout, LayoutError
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel

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
        (
            (CAUSAL8, HALVES),
            {"costs": "2x1"},
            TypeError,
            "make_plan: costs must be a CostModel, such as CostModel.over('4x8') or "
            "group_costs(group), got '2x1'",
        ),
        ((CAUSAL8, HALVES), {"heads": (-4, 2)}, ValueError, "heads must be 0 or more, got (-4, 2)"),
        ((CAUSAL8, HALVES), {"stages": -1}, ValueError, "stages must be 0 or more, got -1"),
        (
            (CAUSAL8, HALVES),
            {"stages": 1.5},
            ValueError,
            "stages must be an integer, or None for the best, got 1.5",
        ),
        (
            (CAUSAL8, HALVES),
            {"team_size": "auto"},
            ValueError,
            "team_size must be an integer, or None for the best, got 'auto'",
        ),
        (
            (CAUSAL8, HALVES),
            {"assignment": "best"},
            ValueError,
            "assignment must be one of auto, owner, balanced, nearest, shared, zigzag, tiled, "
            "got 'best'",
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


@pytest.mark.parametrize("wrong", [{"head_dim": 0}, {"v_dim": -1}, {"batch": 0}])
def test_wrong_head_dims(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="head dims times batch must be 1 or more"):
        make_plan(AttnMask.dense(8), Layout.contiguous(8, 2), **wrong)


def test_costs_of_other_ranks_and_rates_that_are_no_numbers():
    plan = make_plan(CAUSAL8, HALVES)
    with pytest.raises(ValueError, match=r"costs are of 4 ranks \(2x2\), the plan 2"):
        plan.simulate(costs=CostModel.over("2x2"))
    with pytest.raises(TypeError, match="simulate: costs must be a CostModel, such as"):
        plan.simulate(costs="2x1")
    assert CostModel(between_bytes=np.int64(10**9)).between_bytes == 1e9
    for value in ("25e9", True):
        with pytest.raises(TypeError, match="_bytes of a CostModel must be a number, got"):
            CostModel(between_bytes=value)


def test_documents_of_no_heads():
    mask = AttnMask.varlen([0, 10, 40, 64], causal=True)
    assert make_plan(mask, Layout.contiguous(64, 4), heads=(0, 0)).group_size == 4
