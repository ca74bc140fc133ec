"""In low precision, results over ranks are as good as on one device."""

from __future__ import annotations

import pytest
import torch
from dense import assert_same, dense_gradients
from executed import NAMES, SCALE, Shape, run
from torch import Tensor

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan


def gaussian(t: Tensor) -> Tensor:
    return t


def heavy_tailed(t: Tensor) -> Tensor:
    """Like real activations: a few channels are 30 times larger."""
    t = t.clone()
    t[..., ::11] *= 30
    return t


def errors(got: list[Tensor], want: tuple[Tensor, ...]) -> list[float]:
    """Root mean square error of each result."""
    return [(g.double() - w).square().mean().sqrt().item() for g, w in zip(got, want, strict=True)]


def assert_as_good(plan: Plan, shape: Shape, values) -> None:
    """In bf16: at most twice the errors of one device, plus rounding."""
    mask = plan.mask
    low = [values(t).bfloat16() for t in shape.draw(mask)]
    exact = [t.double() for t in low]
    want = dense_gradients(*exact[:3], mask, SCALE, exact[3])
    alone = Layout.contiguous(mask.q_len, 1), Layout.contiguous(mask.k_len, 1)
    single, _ = run(make_plan(mask, *alone), low)
    got, _ = run(plan, low)
    limits = [
        2 * error + torch.finfo(g.dtype).eps / 2 * w.square().mean().sqrt().item()
        for error, g, w in zip(errors(single, want), got, want, strict=True)
    ]
    for name, error, limit in zip(NAMES, errors(got, want), limits, strict=True):
        assert error <= limit, f"{name}: error {error:.3e} > {limit:.3e}"


over_values = pytest.mark.parametrize("values", [gaussian, heavy_tailed])


@pytest.mark.covering(1)
@over_values
@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("team_size", [1, 2])
def test_bf16_is_as_good_as_on_one_device(values, group_size, stages, team_size):
    mask, layout = AttnMask.dense(256, causal=True), Layout.contiguous(256, group_size)
    options = {"assignment": "balanced", "stages": stages, "team_size": team_size}
    assert_as_good(make_plan(mask, layout, **options), Shape(batch=1, d=32, e=32), values)


@pytest.mark.covering(1)
@over_values
@pytest.mark.parametrize("group_size", [2, 8])
@pytest.mark.parametrize("stages", [0, 2])
def test_bf16_rows_merged_at_home_are_as_good(values, group_size, stages):
    """All partial results but the home's own travel in bf16."""
    mask = AttnMask.dense(32, 1024)
    layouts = Layout.contiguous(32, group_size), Layout.contiguous(1024, group_size)
    options = {"assignment": "nearest", "stages": stages, "heads": (4, 2)}
    plan = make_plan(mask, *layouts, **options)
    assert plan.shared_rows
    assert_as_good(plan, Shape(batch=1, d=32, e=32), values)


def test_parts_are_merged_at_home_before_they_are_rounded():
    """Seven parts that bf16 holds exactly: their mean is rounded once, by half a unit at most."""
    q_layout, k_layout = Layout.from_sizes([2, 0, 0, 0, 0, 0, 0]), Layout.contiguous(7 * 16, 7)
    mask = AttnMask.dense(2, 7 * 16)
    plan = make_plan(mask, q_layout, k_layout, assignment="nearest", heads=(1, 1))
    assert plan.shared_rows and (plan.area == 2 * 16).all()
    source = torch.Generator().manual_seed(0)
    values = 1 + torch.randint(0, 128, (7, 64), generator=source) / 128
    v = values.repeat_interleave(16, dim=0).view(1, 7 * 16, 1, 64).bfloat16()
    q, k = v.new_zeros(1, 2, 1, 4), v.new_zeros(1, 7 * 16, 1, 4)
    (out, *_), _ = run(plan, [q, k, v, v.new_zeros(1, 2, 1, 64)])
    assert out.dtype == torch.bfloat16
    assert_same("out", out, values.mean(0).expand(1, 2, 1, 64), 2**-8 + 1e-6)
