"""In which steps keys arrive: each step is the same part of all that moves."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from host_cases import bounded

from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, arrivals, make_plan
from customized_ops.ring_attention.core.topology import Topology

HOSTS = Topology((4,) * 8)
SHARD = 512
HEADS = (64, 8)


def packed(seed: int, shard: int = SHARD) -> tuple[AttnMask, Layout]:
    """Two documents of a dozen shards each, and short ones, in the balanced layout."""
    draw, total = np.random.default_rng(seed), HOSTS.size * shard
    lengths = [int(draw.integers(8, 13)) * shard - 7 for _ in range(2)]
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(draw.integers(shard // 16, shard))))
    mask = AttnMask.varlen(np.cumsum([0, *lengths]), causal=True)
    return mask, Layout.balanced(mask, HOSTS.size, topology=HOSTS)


def in_steps(mask: AttnMask, layout: Layout, held: int) -> Plan:
    costs = replace(CostModel.over(HOSTS), held_shards=math.inf)
    return bounded(make_plan(mask, layout, assignment="owner", stages=1, costs=costs), held)


def received(plan: Plan) -> np.ndarray:
    """int64[P, steps]: keys that each rank receives."""
    steps = [plan.exchanges(rank).kv[1:] for rank in range(plan.group_size)]
    return np.array([[0 if kv is None else kv.tokens for kv in of_rank] for of_rank in steps])


@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_the_same_part(seed: int) -> None:
    plan = in_steps(*packed(seed), 8 * SHARD)
    keys = received(plan)
    assert len(plan.arrivals.slices) == 1 and keys.shape[1] > 2
    assert plan.step_keys > 2.7 * SHARD and keys.max() <= plan.step_keys
    much = keys[keys.sum(axis=1) > 4 * SHARD]
    assert len(much) > 8 and (abs(much / much.mean(axis=1, keepdims=True) - 1) < 0.1).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_sends_as_much_in_every_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of ranges that are too short to be cut: those that it sends to a team, and what it sends
    to different teams, take turns."""
    monkeypatch.setattr(arrivals, "SHORT", 1 / 8)
    mask, layout = packed(seed)
    costs = replace(CostModel.over(HOSTS), held_shards=math.inf)
    given = {"heads": (32, 32), "team_size": 4, "assignment": "owner", "stages": 1}
    plan = make_plan(mask, layout, **given, costs=costs)
    plan = bounded(plan, int(plan.kv_tokens()[:, 1].max()) // 2)
    assert plan.arrivals.steps > 3
    of_ranks = [plan.exchanges(rank).kv[1:] for rank in range(plan.group_size)]
    sent = np.array(
        [[sum(to.count for to in kv.sent.values()) for kv in each] for each in of_ranks]
    )
    assert sent.max(axis=0).sum() < 2 * sent.sum(axis=1).max()  # if in any steps, up to 5 times


def senders(plan: Plan) -> np.ndarray:
    """int64[P, steps]: from how many ranks each rank receives keys of other hosts."""
    host_of, steps = HOSTS.host_of, plan.n_stages - 1
    count = np.zeros((plan.group_size, steps), dtype=int)
    for rank in range(plan.group_size):
        for step, kv in enumerate(plan.exchanges(rank).kv[1:]):
            ways = [] if kv is None else [kv.recv, *([kv.relay.cross.recv] if kv.relay else [])]
            for of_ranks in ways:
                count[rank, step] += (host_of[of_ranks[:, 0]] != host_of[rank]).sum()
    return count


@pytest.mark.parametrize("seed", range(4))
def test_few_senders_send_as_much(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step a rank has messages from fewer ranks, and about as many keys as before."""
    monkeypatch.setattr(arrivals, "SENDERS", 6)
    many = in_steps(*packed(seed), 8 * SHARD)
    few = many.variant(few_senders=True)
    before, after = received(many), received(few)
    assert (before.sum(axis=1) == after.sum(axis=1)).all()
    assert after.max() <= few.step_keys
    assert senders(few).max() < 0.8 * senders(many).max()
    assert senders(few).sum() < 0.7 * senders(many).sum()
    # Each sends to about as many hosts in each step, not to all in one.
    assert few.arrivals.steps <= many.arrivals.steps + 2


def test_senders_are_few_only_where_hosts_are_busy() -> None:
    """With 16 hosts and two long documents a rank has messages from dozens of ranks."""
    hosts, shard = Topology((8,) * 16), 1024
    total = hosts.size * shard
    mask = AttnMask.varlen([0, total // 2 - 100, total - 300, total], causal=True)
    layout = Layout.balanced(mask, hosts.size, topology=hosts)
    slow = replace(CostModel.over(hosts), message_seconds=2e-5)
    few, free = (
        make_plan(mask, layout, heads=HEADS, costs=replace(slow, message_seconds=each))
        for each in (slow.message_seconds, 0.0)
    )
    assert few.n_stages > 2 and few.few_senders and not free.few_senders
    many = few.variant(few_senders=False)
    assert few.met_in_a_step < many.met_in_a_step
    assert few.simulate(*HEADS).seconds < many.simulate(*HEADS).seconds
    blocks = make_plan(
        AttnMask.causal(total), Layout.zigzag(total, hosts.size), heads=HEADS, costs=slow
    )
    assert len(blocks.arrivals.slices) > 1 and not blocks.few_senders
    assert "from few ranks in each" in few.report() and "from few ranks" not in many.report()
    assert pickle.loads(pickle.dumps(few)).few_senders


def test_of_a_long_sequence_hosts_come_one_after_the_other() -> None:
    """Each of them whole, as all ranks need as much from each distance."""
    total = HOSTS.size * SHARD
    plan = in_steps(AttnMask.causal(total), Layout.zigzag(total, HOSTS.size), 12 * SHARD)
    assert plan.arrivals.slices.tolist() == [1] * 8
    assert (received(plan)[:, 1:].max(axis=0) == 4 * SHARD).all()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("kind", ["packed", "causal"])
def test_where_there_are_too_many_ranges_to_count(
    kind: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SENDERS", 6)
    mask, layout = packed(0)
    if kind == "causal":
        mask, layout = AttnMask.causal(mask.q_len), Layout.zigzag(mask.q_len, HOSTS.size)
    monkeypatch.setattr(arrivals, "MOST_COUNTED", 0)
    plan = in_steps(mask, layout, 6 * SHARD).variant(few_senders=few)
    assert 0 < received(plan).max() <= 1.02 * plan.step_keys


def test_few_senders_of_many_steps_fill_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only as many as there are hosts."""
    monkeypatch.setattr(arrivals, "SENDERS", 2)
    monkeypatch.setattr(arrivals, "MOST_COUNTED", 0)
    plan = in_steps(*packed(0), 2 * SHARD).variant(few_senders=True)
    keys = received(plan)
    assert len(plan.arrivals.slices) == 1 and plan.arrivals.steps > 10
    assert keys.max() <= 1.1 * plan.step_keys
    assert (keys[keys.sum(axis=1).argmax()] > 0).all()


def test_short_ranges_of_few_senders_fill_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document in short stripes on the ranks of three hosts, and one on each other rank."""
    monkeypatch.setattr(arrivals, "SENDERS", 8)
    monkeypatch.setattr(arrivals, "SHORT", 1 / 16)
    some, stripe = 12, 8
    long, total = some * SHARD, HOSTS.size * SHARD
    starts = [range(rank * stripe, long, some * stripe) for rank in range(some)]
    ranges = [[(start, start + stripe) for start in each] for each in starts]
    ranges += [[(start, start + SHARD)] for start in range(long, total, SHARD)]
    mask = AttnMask.varlen([0, *range(long, total + 1, SHARD)], causal=True)
    plan = in_steps(mask, Layout.from_ranges(ranges), SHARD).variant(few_senders=True)
    keys, least = received(plan), plan.kv_tokens()[:, 1].max() / plan.step_keys
    assert len(plan.arrivals.slices) == 1 and plan.arrivals.short > stripe / 2
    assert keys.max() <= plan.step_keys and plan.arrivals.steps <= 1.6 * least


@pytest.mark.parametrize("held", [3, 6, 9])
def test_steps_of_a_few_keys_end(held: int) -> None:
    """Not all ranges fit; then there are at most about twice as many steps as keys need."""
    plan = in_steps(*packed(1, shard=16), held)
    most_received, most = int(plan.kv_tokens()[:, 1].max()), plan.step_keys
    assert most_received / most <= plan.arrivals.steps <= 2.5 * most_received / most


@pytest.mark.parametrize("seed", range(3))
def test_a_bound_costs_little(seed: int) -> None:
    """In a simulation, with links that are as fast beside kernels as on real hosts: ranks do not
    wait for one another in each step."""
    mask, layout = packed(seed, shard=8192)
    costs = CostModel.over(HOSTS)
    found = []
    for held in (4.0, math.inf):
        plan = make_plan(mask, layout, heads=HEADS, costs=replace(costs, held_shards=held))
        found.append(plan.simulate().seconds)
        assert (0 < plan.step_keys < plan.kv_tokens()[:, 1].max()) == (held == 4.0)
    assert found[0] < 1.05 * found[1]
