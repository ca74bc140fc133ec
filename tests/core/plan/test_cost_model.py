from dataclasses import replace

import pytest

from customized_ops.ring_attention.core.cost import H200
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL, CostModel

from .simulate.timeline_cases import ROUND

CAUSAL = AttnMask.dense(4096, causal=True)
SIZES = (8, 4, 64, 32, 2)


def test_figures_of_one_plan():
    """By hand: 2 ranks, rank 1 receives 2 keys from rank 0 in two steps of a round."""
    plan = make_plan(AttnMask.dense(4, causal=True), Layout.contiguous(4, 2), assignment="owner")
    forward, backward = ROUND.passes(plan, 1, 1, 100, 100, 2)
    assert not forward.overlap and not backward.overlap
    assert forward.compute.tolist() == pytest.approx([3 * 400 / 1e12, 7 * 400 / 1e12])
    assert backward.compute.tolist() == pytest.approx([3 * 1000 / 0.5e12, 7 * 1000 / 0.5e12])
    assert forward.link.tolist() == pytest.approx([2 * 400 / 1e9 + 1e-6] * 2)
    # Rank 0 sends 2 keys again and receives their gradients, as large in bf16; rank 1 the reverse.
    assert backward.link.tolist() == pytest.approx([2 * 400 / 1e9 + 1e-6] * 2)
    assert forward.seconds == pytest.approx(2.8e-9 + 1.8e-6)
    same, doubled = ROUND.passes(plan, 1, 1, 100, 100, 2, 4)
    assert same.link.tolist() == forward.link.tolist()
    assert doubled.link.tolist() == pytest.approx([2 * 800 / 1e9 + 1e-6] * 2)


def test_overlap_takes_the_longer_of_the_two():
    gathered, staged = (
        make_plan(CAUSAL, Layout.zigzag(4096, 4), stages=stages) for stages in (0, 1)
    )
    after, beside = (ROUND.passes(plan, *SIZES)[0] for plan in (gathered, staged))
    assert after.seconds == pytest.approx(after.compute.max() + after.link.max())
    assert beside.seconds == pytest.approx(max(beside.compute.max(), beside.link.max()))


def test_plans_do_not_depend_on_whether_ways_share_a_link():
    shared = replace(H200_NCCL, link_alone=1.6, between_alone=2.0)
    for layout in (Layout.contiguous(4096, 4), Layout.zigzag(4096, 4)):
        one, other = (make_plan(CAUSAL, layout, costs=costs) for costs in (shared, H200_NCCL))
        assert one.area.tolist() == other.area.tolist()
        assert one.kv_tokens().tolist() == other.kv_tokens().tolist()
        assert shared.passes(one, *SIZES)[1].seconds == H200_NCCL.passes(one, *SIZES)[1].seconds
    for wrong in (0.5, 2.5):
        with pytest.raises(ValueError, match="between_alone of a CostModel must be 1 to 2"):
            replace(shared, between_alone=wrong)


@pytest.mark.parametrize(
    ("costs", "measured_us"),
    [(H200, {16: 49, 64: 177, 256: 690}), (H200_NCCL, {16: 103, 64: 249, 256: 886})],
)
def test_links_are_as_fast_as_measured(costs, measured_us):
    for mebibytes, us in measured_us.items():
        predicted = costs.step_seconds + mebibytes * 2**20 / costs.link_bytes
        assert predicted == pytest.approx(us * 1e-6, rel=0.15)


def test_over_hosts_keys_and_their_gradients_take_turns():
    """A rank that receives keys and sends none sends their gradients, when the keys are there."""
    costs, mask = CostModel.over("2x1"), AttnMask.dense(1024, causal=True)
    plan = make_plan(mask, Layout.contiguous(1024, 2), assignment="owner", costs=costs, stages=1)
    forward, backward = costs.passes(plan, 8, 8, 128, 128, 2)
    keys = 512 * 8 * 2 * 128 * 2 / costs.between_bytes
    start = costs.step_seconds + costs.between_seconds
    assert forward.link[1] == pytest.approx(keys + start)
    assert backward.link[1] == pytest.approx(2 * keys + 2 * start)
