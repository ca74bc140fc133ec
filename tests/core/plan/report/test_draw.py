import sys
import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import to_dense
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.report import paint as paint_module
from customized_ops.ring_attention.core.plan.report import picture
from customized_ops.ring_attention.core.plan.report.paint import PALE, PIXELS, paint, parts_by_step
from customized_ops.ring_attention.core.plan.report.picture import (
    PALETTE,
    _draw_times,
    draw,
    link_bytes,
    rank_colors,
)
from customized_ops.ring_attention.core.plan.report.text import format_seconds
from customized_ops.ring_attention.core.plan.simulate.timeline import HOST
from customized_ops.ring_attention.core.topology import Topology

CAUSAL = AttnMask.dense(64, causal=True)
PLANS = {
    "zigzag": make_plan(CAUSAL, Layout.zigzag(64, 4), stages=1),
    "gathered": make_plan(CAUSAL, Layout.contiguous(64, 4), assignment="balanced", stages=0),
    "stages": make_plan(CAUSAL, Layout.contiguous(64, 8), stages=3),
    "packed": make_plan(AttnMask.varlen([0, 9, 9, 40, 64]), Layout.contiguous(64, 4)),
    "teams": make_plan(CAUSAL, Layout.contiguous(64, 4), team_size=2, stages=2),
    "cross": make_plan(AttnMask.dense(16, 64), Layout.zigzag(16, 2), Layout.contiguous(64, 2)),
    "one rank": make_plan(CAUSAL, Layout.contiguous(64, 1)),
    "many ranks": make_plan(CAUSAL, Layout.contiguous(64, 20)),
    "idle ranks": make_plan(CAUSAL, Layout.from_sizes([64, 0]), assignment="owner"),
    "nothing": make_plan(AttnMask.from_slices([], 8, 8), Layout.contiguous(8, 2)),
    "no tokens": make_plan(AttnMask.dense(0), Layout.contiguous(0, 2)),
}
over_plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@pytest.mark.thin(12)
@over_plans
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_every_plan_can_be_drawn(plan, suffix, tmp_path):
    path = tmp_path / f"plan.{suffix}"
    draw(plan, path, q_heads=4, kv_heads=2, head_dim=16)
    if suffix == "svg":
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    else:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@over_plans
def test_parts_are_the_work_by_where_keys_lie(plan):
    parts, teams, steps = parts_by_step(plan)
    shape = plan.mask.q_len, plan.mask.k_len
    assert (to_dense(parts, *shape) == plan.mask.to_dense()).all()
    pieces, size = plan.k_layout.pieces, plan.team_size
    for part, team, step in zip(parts, teams, steps, strict=True):
        inside = (pieces[:, 1] <= part[2]) & (part[3] <= pieces[:, 2])
        (holder,) = pieces[inside, 0]
        assert (step == 0) == (holder // size == team)
        assert step < max(plan.n_stages, 2)


@over_plans
def test_colours_are_those_of_who_computes(plan):
    """With as many pixels as whole tokens, each pixel is one pair's."""
    if not plan.mask.q_len:
        return
    colors = rank_colors(plan.group_size)
    image = paint(plan, parts_by_step(plan), colors, striped=False)
    down, across = image.shape[0] // plan.mask.q_len, image.shape[1] // plan.mask.k_len
    assert image.shape[:2] == (plan.mask.q_len * down, plan.mask.k_len * across)
    wanted = np.ones((plan.mask.q_len, plan.mask.k_len, 3))
    for part, team, step in zip(*parts_by_step(plan), strict=True):
        color = colors[team * plan.team_size]
        color = color + (1 - color) * PALE if step else color
        wanted[to_dense(part[None], plan.mask.q_len, plan.mask.k_len)] = color
    assert np.array_equal(image, wanted.repeat(down, 0).repeat(across, 1))


def test_stripes_are_where_keys_are_received():
    plan = PLANS["zigzag"]
    colors = rank_colors(4)
    parts = parts_by_step(plan)
    plain, striped = (paint(plan, parts, colors, striped=yes) for yes in (False, True))
    kept = (plain == striped).all(axis=2)
    for part, _, step in zip(*parts, strict=True):
        here = to_dense(part[None], 64, 64).repeat(PIXELS // 64, 0).repeat(PIXELS // 64, 1)
        assert kept[here].all() if step == 0 else 0.3 < kept[here].mean() < 0.7


def test_thin_slices_of_long_masks_are_seen():
    n = 1 << 20
    mask = AttnMask.from_slices([(0, n, 0, 1, -n, 0), (0, n, 1, n, -1, 0)], n, n)
    plan = make_plan(mask, Layout.contiguous(n, 4))
    image = paint(plan, parts_by_step(plan), rank_colors(4), striped=True)
    seen = (image < 1).any(axis=2)
    assert image.shape == (PIXELS, PIXELS, 3)
    assert seen[:, 0].all() and seen.diagonal().all()
    assert seen.sum() < 4 * PIXELS


def test_keys_in_too_many_parts_are_not_told_apart(monkeypatch, tmp_path):
    plan = PLANS["zigzag"]
    monkeypatch.setattr(paint_module, "MAX_PARTS", 10)
    parts, teams, steps = parts_by_step(plan)
    assert parts.tolist() == plan.work[:, :6].tolist()
    assert teams.tolist() == plan.work[:, 6].tolist() and not steps.any()
    draw(plan, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert "who holds the token" in text and "keys it" not in text


@over_plans
def test_link_bytes_are_forward_bytes(plan):
    for heads in ((4, 2), (6, 3), (5, 1)):
        keys, rows = link_bytes(plan, Sizes(*heads, 16, 8, 2))
        moved = plan.forward_bytes(*heads, 16, 8, 2)
        assert (keys + rows).sum(axis=1).tolist() == moved[:, 0].tolist()
        assert (keys + rows).sum(axis=0).tolist() == moved[:, 1].tolist()


@pytest.mark.parametrize("ranks", [9, 130])
def test_bars_of_many_ranks_are_one_piece(ranks):
    """As high as the ranks that they stand for, and as long as what they show."""
    plan = make_plan(AttnMask.dense(64 * ranks, causal=True), Layout.zigzag(64 * ranks, ranks))
    forward, (_, axes) = plan.simulate(4, 4).forward, plt.subplots()
    _draw_times(axes, forward, rank_colors(ranks))
    (bars,) = axes.collections
    corners = np.stack([path.vertices[:4] for path in bars.get_paths()])
    step = -(-ranks // 64)
    assert not axes.patches and corners[..., 1].min() > -0.5
    assert (np.ptp(corners[..., 1], axis=1) >= 0.2 * step).all()
    number, _ = format_seconds(forward.seconds).split()
    seen = [s for s in forward.spans if s.resource != HOST and not s.sends]
    longest = max((s.stop - s.start)[::step].max() for s in seen)
    scale = float(number) / forward.seconds
    assert np.ptp(corners[..., 0], axis=1).max() == pytest.approx(longest * scale)
    plt.close("all")


@pytest.mark.parametrize("ranks", [1, 4, 8, 9, 64])
def test_every_rank_has_its_colour(ranks):
    colors = rank_colors(ranks)
    assert colors.shape == (ranks, 3) and len(np.unique(colors, axis=0)) == ranks
    assert ranks > len(PALETTE) or (colors.max() <= 1 and colors.min() >= 0)


@pytest.mark.parametrize(
    ("hosts", "most", "begin"),
    [((2, 1, 1), 3, [(1, 2), (2, 3)]), ((2, 1, 1), 2, []), ((4,), 3, [])],
)
def test_where_hosts_begin(hosts, most, begin, tmp_path, monkeypatch):
    """Each after the first is marked among senders, receivers and the ranks in time, if few are."""
    monkeypatch.setattr(picture, "MOST_HOSTS", most)
    path, costs = tmp_path / "plan.svg", CostModel(topology=Topology(hosts))
    draw(make_plan(CAUSAL, Layout.zigzag(64, 4), costs=costs), path)
    marks = [each.get("id", "") for each in ElementTree.parse(path).iter()]
    marks = [mark for mark in marks if mark.startswith("host ")]
    assert sorted(marks) == sorted(3 * [f"host {n} from rank {rank}" for n, rank in begin])
    text = path.read_text()
    assert ("dashed: between hosts" in text) == bool(begin)
    assert ("4 ranks of 3 hosts" in text) == (len(hosts) > 1)


def test_an_unknown_format_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="xyz"):
        draw(PLANS["zigzag"], tmp_path / "plan.xyz")


def test_without_matplotlib_an_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'seqshard\[plot\]'"):
        draw(PLANS["zigzag"], tmp_path / "plan.png")
