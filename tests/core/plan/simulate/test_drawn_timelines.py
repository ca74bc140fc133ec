"""Timelines of plans drawn at random: all is there once, and no faster than kernels or links."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from host_cases import drawn_plan

from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL
from customized_ops.ring_attention.core.plan.heads import Sizes
from customized_ops.ring_attention.core.plan.simulate import Timeline, simulate
from customized_ops.ring_attention.core.plan.simulate.counts import counts
from customized_ops.ring_attention.core.plan.simulate.timeline import BETWEEN, HOST, INSIDE, KERNEL
from customized_ops.ring_attention.core.topology import Topology

from .timeline_cases import ROUND

SIZES = Sizes(8, 4, 64, 32, 2)


USUAL = Sizes(32, 8, 128, 128, 2)


def bytes_by_level(plan: Plan, costs: CostModel, sizes: Sizes) -> tuple[float, float]:
    """Of the forward, that all ranks receive, inside hosts and between them."""
    topology = costs.topology
    host_of = np.zeros(plan.group_size, int) if topology is None else topology.host_of
    shares = plan.heads_of_ranks(sizes.q_heads, sizes.kv_heads)
    found, totals = counts(plan), [0.0, 0.0]
    keys = [way for step in found.keys if step is not None for way in step]
    each = [(way, sizes.kv_bytes(shares[:, 1])) for way in keys]
    each.append((found.rows, sizes.q_bytes(shares[:, 0]) + sizes.result_bytes(shares[:, 0])))
    for (holder, reader, tokens), of in each:
        across = host_of[holder] != host_of[reader]
        for level, some in enumerate((~across, across)):
            totals[level] += float((tokens * of[reader])[some].sum())
    return totals[0], totals[1]


@cache
def drawn_case(seed: int) -> tuple[Plan, CostModel, Timeline]:
    """A plan, the rates of links that it is carried out over, and when what happens."""
    plan = drawn_plan(random.Random(seed))
    costs = replace(
        ROUND,
        topology=plan.topology,
        memory_bytes=1e9,
        call_seconds=1e-4,
        one_sided=seed % 2 == 0,
    )
    return plan, costs, simulate(plan, SIZES, costs)


SEEDS = range(40)
over_cases = pytest.mark.parametrize("seed", SEEDS)


@over_cases
def test_all_that_a_plan_does_is_there_once(seed: int) -> None:
    plan, costs, found = drawn_case(seed)
    forward, backward = costs.passes(plan, *SIZES)
    for each, asked in ((found.forward, forward), (found.backward, backward)):
        attends = [
            s.stop - s.start for s in each.spans if s.resource == KERNEL and s.what != "merge"
        ]
        total = np.sum(attends, axis=0) if attends else np.zeros(plan.group_size)
        assert total == pytest.approx(asked.compute)
    inside, between = bytes_by_level(plan, costs, SIZES)
    for sends in (False, True):
        for level, rate, wanted in (
            (INSIDE, costs.link_bytes, inside),
            (BETWEEN, costs.between_bytes, between),
        ):
            moved = found.forward.busy(level, sends=sends).sum() * rate
            assert moved == pytest.approx(wanted, abs=1e-6)
    if plan.topology is not None and not plan.rows_move:
        crossing = plan.crossings[0].across[:, 1].sum() * SIZES.kv_bytes(SIZES.kv_heads)
        one = SIZES.kv_bytes(SIZES.kv_heads) * plan.group_size  # the counts are rounded
        assert abs(between - crossing) <= one or plan.team_size > 1


@over_cases
def test_nothing_is_in_two_places_at_once(seed: int) -> None:
    plan, _, found = drawn_case(seed)
    for each in found.forward, found.backward:
        for rank in range(plan.group_size):
            for resource in (KERNEL, HOST, INSIDE, BETWEEN):
                for sends in (False, True):
                    times = sorted(
                        (s.start[rank], s.stop[rank])
                        for s in each.spans
                        if (s.resource, s.sends) == (resource, sends)
                        and s.stop[rank] > s.start[rank]
                    )
                    assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(times))
                    assert all(start >= 0 and stop <= each.seconds + 1e-12 for start, stop in times)
        busy = each.busy(KERNEL)
        assert busy + each.waits.sum(axis=0) == pytest.approx(each.stop)
        assert each.idle == pytest.approx(each.seconds - busy)


@over_cases
def test_never_faster_than_kernels_or_links(seed: int) -> None:
    plan, costs, found = drawn_case(seed)
    for each, asked in zip(
        (found.forward, found.backward), costs.passes(plan, *SIZES), strict=True
    ):
        assert each.seconds >= asked.compute.max() * (1 - 1e-12)
        for level in (INSIDE, BETWEEN):
            for sends in (False, True):
                assert each.seconds >= each.busy(level, sends=sends).max() * (1 - 1e-12)


FASTER = [
    {"forward_flops": 2e12, "backward_flops": 1e12},
    {"link_bytes": 2e9},
    {"between_bytes": 0.2e9},
    {"step_seconds": 0.0, "between_seconds": 0.0},
    {"call_seconds": 0.0},
    {"memory_bytes": 2e9},
]


@pytest.mark.parametrize("faster", FASTER, ids=lambda rates: next(iter(rates)))
def test_better_rates_are_never_slower(faster: dict[str, float]) -> None:
    gained = 0
    for plan, costs, before in map(drawn_case, SEEDS):
        after = simulate(plan, SIZES, replace(costs, **faster))
        for name in ("forward_seconds", "backward_seconds"):
            assert getattr(after, name) <= getattr(before, name) * (1 + 1e-12)
        gained += after.backward_seconds < before.backward_seconds
    assert gained > 5


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_as_the_cost_model_says_where_all_is_hidden(ranks: int, batch: int) -> None:
    tokens = 2048 * ranks
    plan = make_plan(
        AttnMask.causal(tokens), Layout.zigzag(tokens, ranks), stages=min(ranks - 1, 1)
    )
    costs = CostModel(memory_bytes=np.inf, link_bytes=4e12, step_seconds=0.0, call_seconds=1e-6)
    found = simulate(plan, USUAL, costs, batch=batch)
    forward, backward = costs.passes(plan, *USUAL)
    assert found.forward_seconds == pytest.approx(batch * forward.seconds, rel=1e-9)
    assert found.backward_seconds == pytest.approx(batch * backward.seconds, rel=1e-9)


def test_gathered_keys_are_waited_for() -> None:
    plan = make_plan(AttnMask.causal(4096), Layout.zigzag(4096, 2), stages=0)
    found = simulate(plan, SIZES, ROUND)
    assert found.forward_seconds == pytest.approx(ROUND.passes(plan, *SIZES)[0].seconds, rel=0.02)


def test_a_plan_simulates_itself() -> None:
    plan = make_plan(AttnMask.causal(8192), Layout.zigzag(8192, 2))
    found = plan.simulate(q_heads=64, kv_heads=8, batch=2)
    wanted = simulate(plan, Sizes(64, 8, 128, 128, 2), CostModel(), batch=2)
    assert isinstance(found, Timeline)
    assert found.forward_seconds == wanted.forward_seconds
    assert found.backward_seconds == wanted.backward_seconds
    lines = str(found).splitlines()
    assert len(lines) == 3 and lines[1].startswith("forward") and lines[2].startswith("backward")
    assert str(make_plan(AttnMask.causal(64), Layout.contiguous(64, 1)).simulate(costs=ROUND))
    slow = str(plan.simulate(costs=CostModel(link_bytes=1e9))).splitlines()
    assert "%  link inside, " in slow[1]


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_hosts_are_in_step_with_one_another(hosts: int) -> None:
    """Under a causal mask early hosts need all keys of the others, late ones half of them: in as
    many steps, or ranks with long steps hold up those with short ones."""
    ranks = 4 * hosts
    tokens, heads = 8192 * ranks, (64, 8)
    topology = Topology((4,) * hosts)
    free = {"batch_seconds": 0.0, "message_seconds": 0.0}
    costs = replace(H200_NCCL, topology=topology, held_shards=4.0, **free)
    mask, layout = AttnMask.causal(tokens), Layout.zigzag(tokens, ranks)
    found = make_plan(mask, layout, heads=heads, costs=costs).simulate(*heads)
    assert found.forward.kernel_share > 0.95 and found.backward.kernel_share > 0.95
