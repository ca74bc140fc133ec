"""How many keys of others a rank holds and relays: counted, and bounded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_cases import costs_over

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.choose import plan_request
from customized_ops.ring_attention.core.plan.exchanges.held import (
    TURNS,
    held_in_steps,
    relayed_part,
    tokens_by_rank,
)
from customized_ops.ring_attention.core.plan.exchanges.relays import relay_parts
from customized_ops.ring_attention.core.plan.moves import RECV, SEND, STEP, located
from customized_ops.ring_attention.core.plan.report.hosts import host_figures

SHARD = 64


def over_hosts(seed: int, hosts: tuple[int, ...], held: float = 4.0) -> Plan:
    """A drawn mask and layout over hosts, in which no heads are shared out."""
    source, ranks = random.Random(seed), sum(hosts)
    total = SHARD * ranks
    cuts = sorted({0, total, *(source.randrange(1, total) for _ in range(source.randrange(12)))})
    mask = AttnMask.varlen(cuts, causal=source.random() < 0.7)
    kind = source.choice(["zigzag", "contiguous", "balanced", "few"])
    if kind == "few":  # some ranks hold no tokens
        layout = Layout.from_sizes([SHARD * (n % 3 < 2) for n in range(ranks - 1)] + [0])
        mask = AttnMask.varlen([0, layout.total // 3, layout.total], causal=True)
    elif kind == "balanced":
        layout = Layout.balanced(mask, ranks)
    else:
        layout = getattr(Layout, kind)(total, ranks)
    # Plans are kept by rates, and tests may change what else they depend on.
    costs = replace(costs_over(hosts, held_shards=held), memory_bytes=2.9e12)
    assignment = source.choice(["owner", "balanced"])
    return make_plan(mask, layout, heads=(8, 8), assignment=assignment, costs=costs, team_size=1)


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(30))
def test_what_ranks_relay_is_counted_as_it_is_passed_on(seed: int) -> None:
    """But for halves of ranges of odd lengths."""
    hosts = random.Random(seed).choice([(4, 4), (1, 2, 3), (3, 3), (8, 8)])
    plan = over_hosts(seed, hosts, held=3.0)
    moves = located(plan.kv_needed, plan.k_layout.pieces)
    moves = moves[moves[:, RECV] != moves[:, SEND]]
    if len(moves) == 0:
        return
    assert plan.topology is not None and plan.relays
    steps, ranks = np.tile(moves, (TURNS, 1)), plan.group_size
    steps[:, STEP] = np.arange(TURNS).repeat(len(moves))
    parts = relay_parts(steps, plan.topology.host_of, TURNS)[1]
    received = tokens_by_rank(steps, ranks, TURNS)[:, 0]
    passed = tokens_by_rank(parts, ranks, TURNS)
    pairs = (passed + np.roll(passed, 1, axis=1)).max(axis=1)
    most = received.max()
    found = (2 + plan.relayed_part) * most
    uneven = np.bincount(parts[:, RECV], minlength=ranks).max()
    assert abs(found - min((2 * received + pairs).max(), 3 * most)) <= uneven


@pytest.mark.parametrize(
    ("rows", "keys", "part"),
    [
        # One rank of each host holds keys. Those who relay take turns all the same: each half of
        # what crosses, in two steps.
        ([8] * 8, [32, 0, 0, 0, 32, 0, 0, 0], 32 / 64),
        # Three ranks of a host need keys of three of the other. The first of them relays those of
        # the rank with its own number, and of the rank whose number none of the three has.
        ([0] * 5 + [16] * 3, [16] * 3 + [0] * 5, 3 * 16 / 48),
    ],
    ids=["one holds keys", "three need them"],
)
def test_what_some_ranks_relay(rows: list[int], keys: list[int], part: float) -> None:
    q_layout, k_layout = Layout.from_sizes(rows), Layout.from_sizes(keys)
    costs, mask = costs_over((4, 4), held_shards=1.0), AttnMask.dense(sum(rows), sum(keys))
    given: Any = {"heads": (8, 8), "costs": costs, "team_size": 1, "assignment": "owner"}
    plan = make_plan(mask, q_layout, k_layout, **given)
    assert plan.topology is not None
    found = relayed_part(plan.kv_needed, k_layout, plan.topology.host_of, plan.kv_tokens()[:, 1])
    assert found == pytest.approx(part)


@pytest.mark.thin(3)
@pytest.mark.parametrize("held", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("hosts", [(4, 4), (2,) * 4, (1, 2, 3), (3, 3), (8, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_no_rank_holds_more_than_the_bound(
    seed: int, hosts: tuple[int, ...], held: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_request, "HELD_BYTES", 1)
    plan = over_hosts(seed, hosts, held)
    assert host_figures(plan).received_tokens_at_once <= held * SHARD


def test_steps_by_hosts_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no range is cut: with hosts of two ranks, one relays all that comes in a step."""
    monkeypatch.setattr(plan_request, "HELD_BYTES", 1)
    mask, costs = AttnMask.causal(8 * SHARD), costs_over((2,) * 4, held_shards=2.0)
    layout = Layout.balanced(mask, 8, topology=costs.topology)
    given: Any = {"heads": (8, 8), "head_groups": 2, "costs": costs, "team_size": 1}
    plan = make_plan(mask, layout, assignment="owner", **given)
    assert plan.arrivals is not None and len(plan.arrivals.slices) > 1
    assert host_figures(plan).received_tokens_at_once <= 2 * SHARD


def test_steps_are_larger_where_ranks_relay_little() -> None:
    """Where all ranks of a host need the same keys, each relays an eighth of these in a step."""
    hosts, shard = (8,) * 8, 512
    mask, layout = AttnMask.dense(64 * shard), Layout.contiguous(64 * shard, 64)
    costs = costs_over(hosts)
    given = {"heads": (8, 8), "team_size": 1, "assignment": "owner"}
    plan = make_plan(mask, layout, costs=costs, **given)
    assert plan.relayed_part == pytest.approx(2 / 8 * 56 / 63, rel=0.01)
    assert plan.step_keys == pytest.approx(plan.held_keys / 2.222, rel=0.01)


def test_what_is_held_while_keys_arrive() -> None:
    """Put together from messages, with what is relayed of this step and the next; or attended,
    while the next keys arrive, with what is relayed of the next step and the one after it."""
    received, relayed = np.array([[10, 20, 5]]), np.array([[1, 2, 4]])
    together = [2 * 10 + 1 + 2, 2 * 20 + 2 + 4, 2 * 5 + 4]
    attended = [10 + 20 + 2 + 4, 20 + 5 + 4, 5]
    most = np.maximum(together, attended)
    assert held_in_steps(received, relayed, 1).tolist() == most.tolist()
    most[2] = 5 + 10 + 1 + 2  # then the first keys of the next group of heads arrive
    most[1] = max(most[1], 20 + 5 + 4 + 1)
    assert held_in_steps(received, relayed, 2).tolist() == most.tolist()
