"""Plans in time: small ones by hand, and what holds for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.simulate import PassTimeline, simulate
from customized_ops.ring_attention.core.plan.simulate.timeline import BETWEEN, HOST, INSIDE, KERNEL
from customized_ops.ring_attention.core.topology import Topology

from .timeline_cases import ROUND

PAIR, PAIR_BACK = 400 / 1e12, 1000 / 0.5e12
ONE = Sizes(1, 1, 100, 100, 2)


def spans_of(timeline: PassTimeline, rank: int) -> list[tuple[str, str, float, float]]:
    """Kernels and links of one rank, as they begin."""
    found = [
        (s.resource, s.what + " sent" * s.sends, float(s.start[rank]), float(s.stop[rank]))
        for s in timeline.spans
        if s.stop[rank] > s.start[rank] and s.resource != HOST
    ]
    return sorted(found, key=lambda span: span[2])


def assert_spans(timeline: PassTimeline, rank: int, wanted: list) -> None:
    found = spans_of(timeline, rank)
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[2:] == pytest.approx(other[2:], abs=1e-15)


def test_two_ranks_and_one_exchange() -> None:
    """Rank 0 writes 2 keys to rank 1, 0.8 us, and there it takes 1 us until they can be used."""
    plan = make_plan(AttnMask.causal(4), Layout.contiguous(4, 2), assignment="owner", stages=1)
    found = simulate(plan, ONE, ROUND)
    assert_spans(
        found.forward,
        0,
        [(INSIDE, "keys sent", 0.0, 0.8e-6), (KERNEL, "own", 0.0, 3 * PAIR)],
    )
    assert_spans(
        found.forward,
        1,
        [
            (INSIDE, "keys", 0.0, 0.8e-6),
            (KERNEL, "own", 0.0, 3 * PAIR),
            (KERNEL, "own", 1.8e-6, 1.8e-6 + 4 * PAIR),
        ],
    )
    assert found.forward.stop.tolist() == pytest.approx([0.8e-6, 1.8e-6 + 4 * PAIR])
    assert found.forward.slowest_waits_for == (INSIDE, pytest.approx(1.8e-6 - 3 * PAIR))
    attended = 1.8e-6 + 4 * PAIR_BACK
    assert spans_of(found.backward, 0)[-1][1:] == (
        "gradients",
        pytest.approx(attended),
        pytest.approx(attended + 0.8e-6),
    )
    assert found.backward_seconds == pytest.approx(attended + 1.8e-6)
    assert found.tflops_per_rank[0] == pytest.approx(5 * PAIR / found.forward_seconds)


def test_keys_that_are_relayed() -> None:
    """Two hosts of two ranks with 2 tokens each; every row sees all. To each rank come 2 keys of
    its neighbour, and 2 of the 4 of the other host, and from its neighbour the other 2."""
    costs = replace(ROUND, topology=Topology((2, 2)))
    plan = make_plan(AttnMask.dense(8), Layout.contiguous(8, 4), assignment="owner", costs=costs)
    assert plan.relays and plan.n_stages == 2
    found = simulate(plan, ONE, costs)
    arrive = [
        (BETWEEN, 0.0, 8e-6),  # and 5 us until they are there, then they go on
        (INSIDE, 13e-6, 14.6e-6),  # and 1 us
    ]
    there = 15.6e-6
    for rank in range(4):
        links = [span for span in spans_of(found.forward, rank) if span[0] != KERNEL]
        links.sort(key=lambda span: (span[2], span[0] == BETWEEN))
        assert [span[1] for span in links] == ["keys sent", "keys"] * 2
        for span, (level, *times) in zip(links[::2], arrive, strict=True):
            assert span[0] == level and span[2:] == pytest.approx(times)
        assert spans_of(found.forward, rank)[-1][2:] == pytest.approx((there, there + 12 * PAIR))
    # Gradients: 4 inside, for 2 of the neighbour's own keys and 2 that it relayed, and their sums.
    attended = there + 12 * PAIR_BACK
    assert found.forward.stop.tolist() == pytest.approx([there + 12 * PAIR] * 4)
    assert found.backward.stop.tolist() == pytest.approx([attended + 2.6e-6 + 13e-6] * 4)
    assert found.backward.slowest_waits_for[0] == BETWEEN


def test_the_first_stream_fills_what_the_second_leaves() -> None:
    """Own keys take 16 units, received ones come after 9 and take 8: they are attended at once."""
    plan = make_plan(AttnMask.dense(8), Layout.contiguous(8, 2), assignment="owner", stages=1)
    pair = 1e-7
    costs = replace(ROUND, forward_flops=400 / pair, step_seconds=0.0, link_bytes=1600 / (9 * pair))
    forward = simulate(plan, ONE, costs).forward
    kernels = [span[2:] for span in spans_of(forward, 0) if span[0] == KERNEL]
    assert np.array(kernels) / pair == pytest.approx(np.array([[0, 9], [9, 25], [25, 32]]))
    assert forward.waits.sum() == pytest.approx(0.0, abs=1e-15)


def test_a_slow_host() -> None:
    """Two calls of 1 ms each, whose kernels take no time."""
    plan = make_plan(AttnMask.dense(4), Layout.contiguous(4, 2), assignment="owner", stages=1)
    found = simulate(plan, ONE, replace(ROUND, call_seconds=1e-3))
    assert found.forward.stop.tolist() == pytest.approx([2e-3] * 2)
    assert found.forward.slowest_waits_for[0] == HOST


def test_merges_take_their_bytes() -> None:
    """Of a second part of 2 rows of 100: bf16 read, and fp32 read and written."""
    plan = make_plan(AttnMask.dense(4), Layout.contiguous(4, 2), assignment="owner", stages=1)
    found = simulate(plan, ONE, replace(ROUND, memory_bytes=1e9)).forward
    merges = [span for span in spans_of(found, 0) if span[1] == "merge"]
    assert [stop - start for *_, start, stop in merges] == pytest.approx([2 * 100 * 10 / 1e9])
