import pickle

import numpy as np
import pytest

from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.bounds import lower_bounds
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.report import figures
from customized_ops.ring_attention.core.plan.report.figures import measures
from customized_ops.ring_attention.core.plan.report.text import format_bytes, format_seconds
from customized_ops.ring_attention.core.report import report

REPORT = """\
mask      20 queries x 20 keys, 210 pairs (52.5%)
ranks     4, 4:2 heads of 64 (v: 32), 2 bytes an element
layout    contiguous:20:4
stages    gathered: all keys that a rank needs arrive, then are attended at once
computed  74.3% of the pairs by the holder of the row, 25.7% by another

rank   tokens         pairs of mean calls slices    kv in  rows in      sends   receives   at least
   0        5            54   1.029     2      2       15        2    6.2 KiB    6.6 KiB    2.0 KiB
   1        5            55   1.048     2      2       10        1    5.9 KiB    4.2 KiB    2.1 KiB
   2        5            50   0.952     1      1       10        0    6.1 KiB    4.0 KiB    1.9 KiB
   3        5            51   0.971     1      1       15        0    2.9 KiB    6.2 KiB    2.0 KiB

forward   424.0 us: 400.0 us starting kernels after 24.0 us on links
backward  424.0 us: 400.0 us starting kernels after 24.0 us on links
          at 650 and 590 TFLOP/s, 390 GB/s a rank and way, 12 us to start, 200 us a call
received  21.0 KiB by all ranks; at least 8.6 KiB (+144.0%) for these pairs a rank
          6.6 KiB by the busiest; at least 2.2 KiB (+207.2%)
pairs     55 on the largest rank; at least 53 (+3.8%)
imbalance (largest / mean): 1.048
"""


def causal(tokens: int, ranks: int, **options):
    layout = Layout.contiguous(tokens, ranks)
    return make_plan(AttnMask.dense(tokens, causal=True), layout, **options)


def test_report():
    plan = causal(20, 4, assignment="balanced")
    assert report(plan, 4, 2, 64, 32, 2) + "\n" == REPORT
    assert plan.report(q_heads=4, kv_heads=2, head_dim=64, v_dim=32, itemsize=2) + "\n" == REPORT


def test_of_many_ranks(monkeypatch):
    """Slices are not counted, and a plan keeps no other rank's part, however many there are."""
    plan = causal(20, 4, assignment="balanced")
    size = len(pickle.dumps(plan))
    assert "slices" in report(plan) and len(pickle.dumps(plan)) == size
    monkeypatch.setattr(figures, "MOST_WITH_SLICES", 3)
    assert measures(plan).slices is None and "slices" not in report(plan)


def test_messages_cost_the_host_more():
    plan = causal(20, 4, assignment="balanced")
    text = report(plan, 4, 2, 64, 32, 2, CostModel(batch_seconds=230e-6, message_seconds=5e-6))
    assert "200 us a call, 230 us a batch of messages and 5 us a message" in text
    # Keys come, rows come and go home; in the backward keys go home, too.
    assert "1.17 ms: 1.15 ms starting kernels" in text
    assert "1.42 ms: 1.40 ms starting kernels" in text


def test_report_of_nothing():
    plan = make_plan(AttnMask.from_slices([], 3, 3), Layout.from_sizes([1, 2]), stages=2)
    text = report(plan)
    assert text.startswith("mask      3 queries x 3 keys, 0 pairs (0.0%)\n")
    assert "no rank needs keys of another" in text
    assert text.count("(reached)") == 3
    assert text.endswith("imbalance (largest / mean): 1.000")
    assert "nan" not in text and "inf" not in text


@pytest.mark.thin(2)
@pytest.mark.parametrize("ranks", [16, 17, 64])
@pytest.mark.parametrize("assignment", ["owner", "balanced"])
def test_a_report_fits_a_screen(ranks, assignment):
    plan = causal(1 << 20, ranks, assignment=assignment, heads=(64, 8))
    text = report(plan, 64, 8, 128)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 40
    named = [int(line.split()[0]) for line in lines if line[:4].strip().isdigit()]
    assert named == sorted(set(named))
    figures = measures(plan, 64, 8, 128)
    if ranks <= 16:
        assert named == list(range(ranks)) and "..." not in text
        return
    assert {*range(4), *range(ranks - 4, ranks)} <= set(named)
    for column in (figures.pairs, figures.sent_bytes, figures.received_bytes):
        assert int(column.argmax()) in named
    summary = {line.split()[0]: line.split() for line in lines if line.startswith((" m", "mean"))}
    assert list(summary) == ["min", "mean", "max"]
    for name, cells in summary.items():
        assert cells[2] == f"{getattr(figures.pairs, name)():.0f}"
        assert cells[6] == f"{getattr(figures.kv_received, name)():.0f}"


@pytest.mark.parametrize("team_size", [1, 2, 4])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_measures_are_those_of_the_plan(stages, team_size):
    plan = causal(512, 4, assignment="balanced", stages=stages, team_size=team_size, heads=(4, 2))
    sizes = (4, 2, 16, 8, 4)
    got = measures(plan, *sizes)
    ranks = [plan.rank(r) for r in range(4)]
    assert got.pairs.tolist() == plan.area.tolist() == [mine.area for mine in ranks]
    assert got.tokens.tolist() == [128] * 4
    assert got.calls.tolist() == [mine.calls(1) for mine in ranks]
    tables = [[t for stage in mine.stages for t in (stage.own, stage.remote)] for mine in ranks]
    assert got.slices.tolist() == [sum(map(len, mine)) for mine in tables]
    assert got.kv_received.tolist() == plan.kv_tokens()[:, 1].tolist()
    assert got.rows_received.tolist() == plan.q_tokens()[:, 1].tolist()
    moved = plan.forward_bytes(*sizes)
    assert got.sent_bytes.tolist() == moved[:, 0].tolist()
    assert got.received_bytes.tolist() == moved[:, 1].tolist()
    assert got.imbalance == pytest.approx(plan.area.max() * 4 / plan.area.sum())
    least = lower_bounds(plan, Sizes.of(*sizes))
    assert got.bounds.received.tolist() == least.received.tolist()
    assert got.pairs_gap == pytest.approx(plan.area.max() / least.pairs)
    assert got.bytes_gap == pytest.approx(moved[:, 1].sum() / least.total)
    assert got.busiest_gap == pytest.approx(moved[:, 1].max() / least.busiest)
    assert min(got.pairs_gap, got.bytes_gap, got.busiest_gap) >= 1


def test_pairs_away_are_those_of_foreign_rows():
    plan = causal(64, 4, assignment="balanced")
    holder = np.repeat(np.arange(4), 16)
    away = [0, 0, 0, 0]
    for q0, q1, k0, k1, lo, hi, team in plan.work.tolist():
        for q in range(q0, q1):
            pairs = min(k1 - 1, q + hi) - max(k0, q + lo) + 1
            away[team] += pairs * (holder[q] != team)
    assert measures(plan).away_pairs.tolist() == away
    assert sum(away) > 0
    assert measures(causal(64, 4, assignment="owner")).away_pairs.tolist() == [0] * 4


def test_gap_is_infinite_where_nothing_need_move():
    plan = make_plan(AttnMask.dense(4096, window=(10, 0)), Layout.contiguous(4096, 4))
    assert measures(plan).bytes_gap == float("inf")
    assert "at least 0 B for these pairs a rank" in report(plan)


def test_costs_are_named_and_used():
    plan = causal(65536, 4)
    slow = CostModel(forward_flops=1e12, backward_flops=2e12, link_bytes=3e9, step_seconds=4e-6)
    assert "at 1 and 2 TFLOP/s, 3 GB/s a rank and way, 4 us to start" in report(plan, costs=slow)
    got = measures(plan, 8, 2, 64, costs=slow)
    assert got.forward.seconds == pytest.approx(slow.passes(plan, 8, 2, 64, 64, 2)[0].seconds)


@pytest.mark.parametrize(("tokens", "floor"), [(256, True), (8192, False)])
def test_what_may_be_held_in_any_case_is_said(tokens, floor):
    costs, ranks = CostModel.over("4x8"), 32
    layout = Layout.zigzag(tokens * ranks, ranks)
    plan = make_plan(AttnMask.causal(tokens * ranks), layout, heads=(64, 8), costs=costs)
    text = plan.report(64, 8, 128)
    assert "a rank holds at most" in text
    assert ("128.0 MiB are allowed in any case" in text) == floor


def test_gradients_may_travel_in_fewer_bytes():
    plan = causal(65536, 4, assignment="owner")
    costs = CostModel(step_seconds=0.0)
    wide, halved = (measures(plan, 8, 2, 64, costs=costs, reduce_itemsize=n) for n in (4, 2))
    assert halved.backward.link.max() == pytest.approx(wide.backward.link.max() / 2)
    assert halved.forward.link.tolist() == wide.forward.link.tolist()
    text = plan.report(8, 2, 64, reduce_itemsize=4)
    assert text == report(plan, 8, 2, 64, reduce_itemsize=4) != plan.report(8, 2, 64)


def test_teams_are_named():
    text = causal(4096, 4, team_size=2).report(32, 8, 128)
    assert "teams     of 2 ranks, which share out the heads of the same pairs: 16:4 each" in text
    even = make_plan(AttnMask.dense(64), Layout.contiguous(64, 4), team_size=2)
    text = even.report(6, 3, 128)
    assert "share out the heads of the same pairs: 4:2 or 2:1 each" in text
    assert text.splitlines()[-1] == "imbalance (largest / mean): 1.333"


def test_different_layouts_are_named_both():
    plan = make_plan(AttnMask.dense(8, 12), Layout.zigzag(8, 2), Layout.contiguous(12, 2))
    assert "layout    q zigzag:8:2, k contiguous:12:2\n" in report(plan)


def test_heads_that_do_not_suit_are_an_error():
    with pytest.raises(ValueError, match="team_size must be 1 to 3"):
        report(causal(4096, 4, team_size=4), 3, 3)


def test_long_names_of_layouts_are_cut():
    assert "layout    sizes:1,2\n" in report(
        make_plan(AttnMask.dense(3), Layout.from_sizes([1, 2]))
    )
    text = report(make_plan(AttnMask.dense(64_000), Layout.from_sizes([1000] * 64)))
    (name,) = (line[10:] for line in text.splitlines() if line.startswith("layout    "))
    assert len(name) == 40 and name.endswith("...")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 us"), (2.5e-6, "2.5 us"), (0.0015, "1.50 ms"), (61, "61.00 s")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text
