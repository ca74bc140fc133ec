"""Clocks: what one event does to those of all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.simulate.counts import Sent, counts
from customized_ops.ring_attention.core.plan.simulate.ranks import Ranks
from customized_ops.ring_attention.core.topology import Topology

US = 1e-6
# 1000 bytes take 1 us inside a host, and 10 us between hosts.
COSTS = CostModel(
    link_bytes=1e9,
    step_seconds=0.5 * US,
    between_bytes=1e8,
    between_seconds=5 * US,
    call_seconds=0.0,
    memory_bytes=np.inf,
)


def ranks(
    count: int, *, one_sided: bool, hosts: tuple[int, ...] = (), costs: CostModel = COSTS
) -> Ranks:
    host_of = np.repeat(np.arange(len(hosts)), hosts) if hosts else np.zeros(count, np.int64)
    return Ranks(costs, host_of, one_sided=one_sided)


def sent(*messages: tuple[int, int, float]) -> Sent:
    holder, reader, nbytes = zip(*messages, strict=True)
    return Sent(np.array(holder), np.array(reader), np.array(nbytes, dtype=float))


def arrived(found: Ranks, *messages: tuple[int, int, float]) -> list[float]:
    at = found.send("keys", 0, sent(*messages)).batch.at[0]
    return (at.max(axis=0) / US).tolist()


@pytest.mark.parametrize(("one_sided", "begins"), [(True, 0.0), (False, 4.0)])
def test_messages_wait_for_both_ends_and_writes_for_one(one_sided: bool, begins: float) -> None:
    busy = ranks(2, one_sided=one_sided)
    busy.attend("own", 0, np.array([0.0, 4 * US]))
    assert arrived(busy, (0, 1, 1000)) == pytest.approx([0.0, begins + 1.5])
    busy = ranks(2, one_sided=one_sided)
    busy.attend("own", 0, np.array([4 * US, 0.0]))
    assert arrived(busy, (0, 1, 1000)) == pytest.approx([0.0, 5.5])


@pytest.mark.parametrize("one_sided", [True, False])
def test_a_link_is_shared_at_either_end(one_sided: bool) -> None:
    into_one = arrived(ranks(3, one_sided=one_sided), (0, 2, 1000), (1, 2, 2000))
    assert into_one == pytest.approx([0.0, 0.0, 3.5])
    from_one = arrived(ranks(3, one_sided=one_sided), (0, 1, 1000), (0, 2, 2000))
    assert from_one == pytest.approx([0.0, 3.5, 3.5])
    both_ways = arrived(ranks(2, one_sided=one_sided), (0, 1, 1000), (1, 0, 1000))
    assert both_ways == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize(
    ("alone", "messages", "at"),
    [
        (2.0, [(0, 1, 1000), (1, 0, 1000)], [1.5, 1.5]),
        (2.0, [(0, 1, 1000), (1, 0, 500)], [1.25, 1.25]),
        (2.0, [(0, 1, 1000)], [0.0, 1.0]),
        (1.25, [(0, 1, 1000)], [0.0, 1.3]),
        (1.25, [(0, 1, 1000), (1, 0, 900)], [1.45, 1.45]),
        (2.0, [(0, 1, 1000), (1, 2, 1000)], [0.0, 1.5, 1.5]),
    ],
)
def test_both_ways_share_a_link(
    alone: float, messages: list[tuple[int, int, float]], at: list[float]
) -> None:
    """What goes one way only is that much faster; the sum of both is not."""
    costs = replace(COSTS, link_alone=alone)
    found = ranks(len(at), one_sided=False, costs=costs)
    assert arrived(found, *messages) == pytest.approx(at)
    found = ranks(len(at), one_sided=False, hosts=(1,) * len(at), costs=costs)
    assert arrived(found, (0, 1, 1000)) == pytest.approx([0.0, 15.0] + [0.0] * (len(at) - 2))
    one, other = (ranks(len(at), one_sided=True, costs=each) for each in (COSTS, costs))
    assert arrived(one, *messages) == arrived(other, *messages)  # writes have no such links


@pytest.mark.parametrize("alone", [1.0, 1.0 + 1e-9])
def test_a_message_ends_on_neither_end_before_it_could(alone: float) -> None:
    """Rank 0 sends to rank 1, and to rank 2, which is late: so what it sends next is late, too."""
    found = ranks(4, one_sided=False, costs=replace(COSTS, link_alone=alone))
    found.attend("own", 0, np.array([0.0, 0.0, 100 * US, 0.0]))
    assert arrived(found, (0, 1, 1000), (0, 2, 1000)) == pytest.approx([0.0, 101.5, 101.5, 0.0])
    assert arrived(found, (0, 3, 1000)) == pytest.approx([0.0, 0.0, 0.0, 102.5])


def test_a_link_carries_one_exchange_after_the_other() -> None:
    found = ranks(3, one_sided=True)
    assert arrived(found, (0, 2, 1000)) == pytest.approx([0.0, 0.0, 1.5])
    assert arrived(found, (1, 2, 1000)) == pytest.approx([0.0, 0.0, 2.5])


def test_messages_are_one_exchange_after_the_other_on_every_rank() -> None:
    """Also where others would have time: rank 1 is in both."""
    found = ranks(3, one_sided=False)
    assert arrived(found, (0, 1, 1000)) == pytest.approx([0.0, 1.5, 0.0])
    assert arrived(found, (1, 2, 1000)) == pytest.approx([0.0, 0.0, 3.0])


def test_levels_have_links_of_their_own() -> None:
    found = ranks(4, one_sided=False, hosts=(2, 2))
    assert arrived(found, (0, 1, 1000), (0, 2, 1000)) == pytest.approx([0.0, 1.5, 15.0, 0.0])


def test_copies_hold_up_the_stream_that_they_are_on() -> None:
    """Of one-sided writes: those of the sender; messages travel beside it."""
    for one_sided, begins in ((True, 1.0), (False, 0.0)):
        found = ranks(2, one_sided=one_sided)
        found.send("keys", 0, sent((0, 1, 1000)))
        found.attend("own", 0, np.array([1 * US, 1 * US]))
        starts = found.end().spans[-1].start / US
        assert starts == pytest.approx([begins, 0.0])


def test_a_host_spends_time_on_each_batch_and_each_message() -> None:
    """Whoever sends or receives; what leaves together is one batch."""
    costs = replace(COSTS, batch_seconds=10 * US, message_seconds=1 * US)
    found = ranks(4, one_sided=False, costs=costs)
    with found.together():
        found.send("keys", 0, sent((0, 1, 1000), (0, 2, 1000)))
        found.send("keys", 1, sent((1, 0, 1000)))
    assert (found._host / US).tolist() == pytest.approx([13.0, 12.0, 11.0, 0.0])
    found.send("keys", 2, sent((0, 1, 1000)))
    assert (found._host / US).tolist() == pytest.approx([24.0, 23.0, 11.0, 0.0])
    writes = ranks(4, one_sided=True, costs=costs)
    writes.send("keys", 0, sent((0, 1, 1000)))
    assert not writes._host.any()


@pytest.mark.parametrize("kind", ["packed", "causal"])
@pytest.mark.parametrize("team_size", [1, 4])
def test_a_plan_has_about_as_many_messages_as_it_is_taken_to_have(
    kind: str, team_size: int
) -> None:
    """Of the busiest rank, in the median step; within a factor of two."""
    count, tokens, hosts = 64, 512, Topology((8,) * 8)
    mask, layout = AttnMask.causal(count * tokens), Layout.zigzag(count * tokens, count)
    if kind == "packed":
        bounds = [0, 1000, 1300, 6000, 20_000, 20_100, count * tokens]
        mask = AttnMask.varlen(bounds, causal=True)
        layout = Layout.balanced(mask, count, topology=hosts)
    costs = replace(CostModel.over(hosts), batch_seconds=0.0, message_seconds=1.0)
    plan = make_plan(mask, layout, heads=(8, 8), costs=costs, team_size=team_size)
    assert plan.relays == (team_size == 1)
    found = []
    for step in filter(None, counts(plan).keys):
        ends = np.concatenate([side for each in step for side in (each.holder, each.reader)])
        found.append(np.bincount(ends, minlength=count).max())
    assert 0.5 < costs.usual_batch_seconds(plan) / np.median(found) < 2


@pytest.mark.filterwarnings("error:invalid value:RuntimeWarning")
def test_a_plan_without_keys_is_taken_to_have_some_messages() -> None:
    costs, layout = CostModel.over("2x2"), Layout.contiguous(8, 4)
    none = Layout.contiguous(0, 4)
    plan = make_plan(AttnMask.dense(8, 0), layout, none, costs=costs, team_size=2)
    assert plan.met.tolist() == [0, 0] and costs.usual_batch_seconds(plan) > 0


@pytest.mark.parametrize(("hosts", "messages"), [(None, 4), ((8, 2), 18)])
def test_how_many_messages_a_batch_is_taken_to_have(
    hosts: tuple[int, ...] | None, messages: int
) -> None:
    topology = None if hosts is None else Topology(hosts)
    costs = replace(COSTS, topology=topology, batch_seconds=10 * US, message_seconds=1 * US)
    assert costs.usual_batch_seconds() / US == pytest.approx(10 + messages)
