"""Keys that cross to a host once, and arrive in steps that hold few of them: exchanges followed
token by token, as ranks carry them out."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from host_cases import HOSTS, bounded, costs_over, drawn

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.plan.exchanges.exchange import Exchange
from customized_ops.ring_attention.core.plan.exchanges.peer_tokens import Where
from customized_ops.ring_attention.core.plan.heads import Sizes, TokenBytes
from customized_ops.ring_attention.core.plan.report.hosts import host_bytes, least_into
from customized_ops.ring_attention.core.topology import Topology

Part = Callable[[Exchange], Exchange | None]


def indices(where: Where) -> np.ndarray:
    return (
        np.arange(where.start, where.start + where.count)
        if where.indices is None
        else where.indices
    )


class Carried:
    """The exchanges of a plan carried out: -1 is where nothing has arrived."""

    def __init__(self, plan: Plan, hosts: tuple[int, ...]) -> None:
        self.plan, self.host_of = plan, Topology(hosts).host_of
        self.ranks = range(plan.group_size)
        self.into: list[list[int]] = [[] for _ in hosts]  # tokens that crossed
        self.at_once: list[int] = []  # of each rank and step
        for step, first in enumerate(plan.exchanges(0).kv):
            if first is not None:
                self.carry_out([plan.exchanges(rank).kv[step] for rank in self.ranks])

    def carry_out(self, exchanges: list[Exchange]) -> None:
        own = [self.plan.k_layout.positions(rank) for rank in self.ranks]
        buffers = [np.full(e.tokens, -1) for e in exchanges]
        relayed = [np.full(e.relay.cross.tokens if e.relay else 0, -1) for e in exchanges]
        self.move([e for e in exchanges], own, buffers)
        self.move([e.relay.cross if e.relay else None for e in exchanges], own, relayed)
        self.move([e.relay.spread if e.relay else None for e in exchanges], relayed, buffers)
        for buffer, exchange in zip(buffers, exchanges, strict=True):
            assert (buffer == exchange.indices).all()
            self.at_once.append(len(buffer))

    def move(
        self, exchanges: list[Exchange | None], source: list[np.ndarray], target: list[np.ndarray]
    ) -> None:
        for rank, exchange in enumerate(exchanges):
            for peer, where in exchange.received.items() if exchange else ():
                sender = exchanges[peer]
                assert sender is not None
                tokens = source[peer][indices(sender.sent[rank])]
                assert len(tokens) == where.count
                assert (tokens >= 0).all()
                assert (target[rank][indices(where)] == -1).all(), "a place is filled twice"
                target[rank][indices(where)] = tokens
                if self.host_of[peer] != self.host_of[rank]:
                    self.into[self.host_of[rank]] += tokens.tolist()


@pytest.mark.thin(3)
@pytest.mark.parametrize("seed", range(60))
def test_every_key_arrives_and_crosses_once(seed: int) -> None:
    source = random.Random(seed)
    hosts = source.choice(HOSTS)
    mask, layout = drawn(source, sum(hosts))
    plan = make_plan(
        mask,
        layout,
        stages=source.choice([None, 0, 1, 2]),
        assignment=source.choice(["owner", "balanced", "auto"]),
        costs=costs_over(hosts),
    )
    most = source.choice([0, max(10, mask.q_len // 8)])
    carried = Carried(bounded(plan, most), hosts)
    for into in carried.into:
        if plan.relays:
            assert len(into) == len(set(into))
    if most and not plan.gathered:
        assert max(carried.at_once, default=0) <= most


@pytest.mark.thin(2)
@pytest.mark.parametrize("hosts", HOSTS)
def test_what_crosses_is_what_the_model_counts(hosts: tuple[int, ...]) -> None:
    for seed in range(8):
        mask, layout = drawn(random.Random(seed), sum(hosts))
        plan = make_plan(mask, layout, assignment="owner", costs=costs_over(hosts))
        carried = Carried(plan, hosts)
        inside, across, _ = plan.crossings[0]
        received = np.bincount(Topology(hosts).host_of, across[:, 1])
        rounding = max(hosts) if plan.relays else 0
        for counted, tokens in zip(received, carried.into, strict=True):
            assert abs(counted - len(tokens)) <= rounding
        assert (inside + across)[:, 1].sum() == plan.kv_tokens()[:, 1].sum()


def test_64_ranks_on_8_hosts() -> None:
    """Every host needs all keys of a full causal mask: each of them crosses to it once."""
    total, hosts = 64 * 512, (8,) * 8
    mask, layout = AttnMask.dense(total, causal=True), Layout.zigzag(total, 64)
    plan = make_plan(mask, layout, costs=costs_over(hosts))
    into = np.bincount(Topology(hosts).host_of, plan.crossings[0].across[:, 1])
    assert into.max() == pytest.approx(total * 7 / 8, rel=1e-3)
    alone = make_plan(mask, layout, costs=costs_over((1,) * 64), assignment="owner")
    apart = alone.crossings[0].across[:, 1]
    assert np.bincount(Topology(hosts).host_of, apart).max() > 7 * total


@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_received_keys_do_not_grow_with_ranks(ranks: int) -> None:
    total, hosts = ranks * 8192, (8,) * (ranks // 8)
    mask, layout = AttnMask.dense(total, causal=True), Layout.zigzag(total, ranks)
    plan = make_plan(mask, layout, costs=costs_over(hosts))
    tokens = [each.tokens for each in plan.exchanges(ranks // 2).kv if each is not None]
    relayed = [
        each.relay.cross.tokens for each in plan.exchanges(ranks // 2).kv if each and each.relay
    ]
    assert sum(tokens) > ranks / 2 * 8192
    assert plan.head_groups > 1, "of fewer heads there are more keys in as many bytes"
    assert 2 * max(tokens) + 2 * max(relayed) <= 4 * 8192 * plan.head_groups


def test_few_keys_come_at_once() -> None:
    """A bound that holds anyway changes nothing."""
    mask, layout = AttnMask.dense(4096, causal=True), Layout.zigzag(4096, 8)
    one_host = CostModel(held_shards=4.0)
    assert make_plan(mask, layout, costs=one_host).n_stages == make_plan(mask, layout).n_stages


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("tokens", [256, 8192])
def test_the_bound_is_of_the_bytes_of_the_call(tokens: int, itemsize: int) -> None:
    """Of a shard's bytes, so as many keys whatever the elements are; or of 128 MiB."""
    mask, layout = AttnMask.dense(8 * tokens, causal=True), Layout.zigzag(8 * tokens, 8)
    plan = make_plan(
        mask,
        layout,
        heads=(32, 32),
        assignment="owner",
        itemsize=itemsize,
        costs=costs_over((4, 4)),
    )
    key_bytes = 2 * 32 * 128 * itemsize
    bound = max(4 * tokens * key_bytes, 128 << 20)
    assert plan.held_keys == bound // key_bytes
    assert (plan.held_keys == 4 * tokens) == (tokens == 8192)


def test_hosts_of_another_group_are_refused() -> None:
    mask, layout = AttnMask.dense(64), Layout.contiguous(64, 4)
    with pytest.raises(ValueError, match="hosts 2x4 have 8 ranks, the layout 4"):
        make_plan(mask, layout, costs=costs_over((4, 4)))


@pytest.mark.parametrize(("text", "hosts"), [("2x3", (3, 3)), ("4,4,2", (4, 4, 2)), ("1x5", (5,))])
def test_hosts_as_text(text: str, hosts: tuple[int, ...]) -> None:
    assert Topology.parse(text) == Topology(hosts)
    assert Topology.parse(str(Topology(hosts))) == Topology(hosts)


@pytest.mark.parametrize("text", ["", "5", "two", "0x4", "2x", "4,-1"])
def test_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"hosts are given as 8x4 \(hosts x ranks\) or 4,4,2"):
        Topology.parse(text)


def test_hosts_by_name() -> None:
    assert Topology.of(["a", "a", "b"]) == Topology((2, 1))
    assert Topology.of(["a", "a"]) is None
    assert Topology.of(["a", "b", "a"]) is None  # its ranks do not follow one another


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(40))
def test_what_must_enter_hosts_is_no_more_than_what_does(seed: int) -> None:
    """Whichever way work is assigned, for every host."""
    source = random.Random(seed)
    hosts = source.choice(HOSTS)
    mask, layout = drawn(source, sum(hosts))
    topology, sizes = Topology(hosts), Sizes(4, source.choice([1, 2, 4]), 8, 8, 2)
    every = np.array([sizes[:2]] * sum(hosts))
    passes = TokenBytes.forward(sizes, every), TokenBytes.backward(sizes, every, 4)
    for assignment in ("owner", "balanced", "nearest", "shared", "zigzag"):
        plan = make_plan(mask, layout, assignment=assignment, costs=costs_over(hosts))
        if plan.topology is None:
            continue
        keys, rows = (each.across for each in plan.crossings)
        for of in passes:
            received = keys[:, 1] * of.key_out + keys[:, 0] * of.key_back
            received = received + rows[:, 1] * of.row_out + rows[:, 0] * of.row_back
            into = np.bincount(topology.host_of, received)
            for host, entering in enumerate(into.tolist()):
                # Counts of what is relayed are rounded for each rank.
                rounding = hosts[host] * int(of.key_out[0] + of.key_back[0]) * plan.relays
                assert least_into(plan, host, of) <= entering + rounding


def test_what_must_enter_is_known_exactly() -> None:
    """Half of all pairs, of which the half are at home: all other rows, or as many keys, which are
    twice as large."""
    plan = make_plan(AttnMask.dense(16), Layout.contiguous(16, 2), costs=costs_over((1, 1)))
    sizes = Sizes(1, 1, 8, 8, 2)
    (forward, forward_at_least), (backward, backward_at_least) = host_bytes(plan, sizes)
    assert forward_at_least == 8 * sizes.q_bytes(1)
    assert forward == 8 * sizes.kv_bytes(1)
    # Rows come with results and their gradients, so keys are cheaper. Of the 192 pairs of own rows
    # or own keys others compute 64: gradients of 4 own rows, which have 16 each.
    assert backward_at_least == 8 * sizes.kv_bytes(1) + 4 * sizes.q_bytes(1)
    assert backward == 2 * forward
    assert "into the busiest forward 2.0 KiB, at least 1.0 KiB (+100.0%)" in plan.report(4, 4, 16)


@pytest.mark.filterwarnings("error")
def test_hosts_whose_ranks_need_nothing_of_others() -> None:
    """Steps are asked for, and there is nothing to bring in them."""
    mask = AttnMask.varlen([0, 8, 16, 24, 32], causal=True)
    plan = make_plan(mask, Layout.contiguous(32, 4), stages=2, costs=costs_over((2, 2)))
    assert plan.relays
    assert not plan.keys_move
    assert plan.arrivals is not None
    assert all(exchange is None or exchange.empty for exchange in plan.exchanges(1).kv)


def relays_of(plan: Plan, rank: int) -> list[Exchange]:
    """What the rank relays, and its own keys that it spreads, in each step."""
    return [each.relay.cross for each in plan.exchanges(rank).kv if each and each.relay]


@pytest.mark.parametrize("hosts", [(8,) * 8, (4, 8, 3, 8)])
def test_a_rank_has_messages_for_few_ranks_of_other_hosts(hosts: tuple[int, ...]) -> None:
    """In each step one in each of them: first the one with its own number there, then the next one,
    and in the last of an odd number of steps the one after that."""
    ranks, host_of = sum(hosts), Topology(hosts).host_of
    mask, layout = AttnMask.dense(ranks * 64), Layout.zigzag(ranks * 64, ranks)
    number, seen = np.arange(ranks) - host_of.searchsorted(host_of), set()
    for stages in range(1, 8):
        costs = costs_over(hosts, held_shards=ranks)
        plan = make_plan(mask, layout, stages=stages, costs=costs, assignment="owner")
        steps, turns = plan.n_stages - 1, set()
        for rank in range(ranks):
            for step, cross in enumerate(relays_of(plan, rank)):
                peers = [peer for peer in cross.sent if peer != rank]
                turn = {int(number[p] - number[rank]) % hosts[host_of[p]] for p in peers}
                turns |= turn
                if steps > 1:
                    assert len(peers) == len({*host_of[peers].tolist()})
                    assert turn <= {2 if steps % 2 and step == steps - 1 else step % 2}
        assert turns == ({0, 1, 2} if steps % 2 and steps > 1 else {0, 1})
        seen.add(steps)
    assert {1, 2, 5} <= seen


@pytest.mark.parametrize("most", [0, 150, 100, 60, 50])
@pytest.mark.parametrize("hosts", [(1, 2, 3), (2, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("kind", ["striped", "zigzag", "contiguous"])
def test_of_two_steps_a_rank_relays_no_more_than_it_needs_of_one(
    kind: str, hosts: tuple[int, ...], most: int
) -> None:
    """Also of ranges of one key, as a striped layout has them, and of the last step of a group of
    heads and the first one of the next."""
    ranks = sum(hosts)
    mask, layout = AttnMask.dense(64 * ranks), getattr(Layout, kind)(64 * ranks, ranks)
    plan = make_plan(mask, layout, costs=costs_over(hosts), assignment="owner")
    plan = bounded(plan, most)
    for rank in range(ranks):
        needed = max(each.tokens for each in plan.exchanges(rank).kv if each)
        received = [
            sum(where.count for peer, where in cross.received.items() if peer != rank)
            for cross in relays_of(plan, rank)
        ]
        for this, following in zip(received, received[1:] + received[:1], strict=True):
            assert this + following <= 1.1 * needed + 8
