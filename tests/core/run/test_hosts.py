"""Ranks in several hosts, in process: the same results as on one device, and what crosses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from executed import LAYOUTS, MASKS, STRIDES, Shape, check

from customized_ops.ring_attention import wrap_ring_attn_func, wrap_ring_attn_varlen_func
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, run_ranks
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, arrivals, make_plan
from customized_ops.ring_attention.core.plan.cost_model import CostModel
from customized_ops.ring_attention.core.topology import Topology

HOSTS = [(2,) * 4, (4, 4), (3, 1), (3, 3), (2, 2, 2), (1, 2, 3), (1, 1, 1), (2, 3)]
LAYOUTS_BY_RANKS = [Layout.contiguous, Layout.zigzag, Layout.striped]


def drawn(source: random.Random, hosts: tuple[int, ...]) -> Plan:
    """A plan with a bound that splits it in many steps."""
    mask, ranks = source.choice(list(MASKS.values())), sum(hosts)
    q_layout = source.choice(LAYOUTS_BY_RANKS)(mask.q_len, ranks)
    k_layout = source.choice(LAYOUTS_BY_RANKS)(mask.k_len, ranks)
    plan = make_plan(
        mask,
        q_layout,
        q_layout if mask.q_len == mask.k_len and source.random() < 0.7 else k_layout,
        stages=source.choice([None, 0, 1, 2]),
        assignment=source.choice(["owner", "balanced", "auto", "shared", "nearest", "tiled"]),
        heads=Shape().heads,
        head_groups=source.choice([None, None, 2]),
        costs=CostModel(topology=Topology(hosts), held_shards=4.0),
    )
    given = (mask, plan.q_layout, plan.k_layout, plan.work, plan.team_size, plan.steps)
    options = {"head_groups": plan.head_groups, "held_keys": source.choice([0, 9, 24])}
    few = source.random() < 0.5
    return Plan(*given, topology=plan.topology, **options, few_senders=few)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 1000), marks=pytest.mark.slow)], ids=len
)
def test_same_as_one_device(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "SENDERS", 2)
    for seed in seeds:
        source = random.Random(seed)
        plan = drawn(source, source.choice(HOSTS))
        strides = source.choice(list(STRIDES.values()))
        # Of one batch entry with even rows, what arrives in order is read in place.
        shape = source.choice([Shape(), Shape(batch=1, e=4)])
        check(plan, shape.draw(plan.mask, seed), strides=strides)


def test_steps_without_hosts() -> None:
    """Few keys at once where links are alike: by ring distance."""
    mask = MASKS["causal"]
    plan = make_plan(mask, LAYOUTS["zigzag 8"](mask.q_len), heads=Shape().heads)
    given = (mask, plan.q_layout, plan.k_layout, plan.work, 1, 1)
    few = Plan(*given, held_keys=14)
    assert few.n_stages > 3
    assert max(kv.tokens for kv in few.exchanges(7).kv if kv) <= 7
    check(few, Shape().draw(mask))


class Sent(dict[int, int]):
    """Bytes that each rank sends to other hosts and, ``inside``, to ranks of its own."""

    def __init__(self, ranks: int) -> None:
        super().__init__(dict.fromkeys(range(ranks), 0))
        self.inside = dict.fromkeys(range(ranks), 0)


@pytest.fixture
def crossed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What ranks send; a test names other hosts than 2 of 2."""
    topology = Topology(getattr(request, "param", (2, 2)))
    host_of, bytes_ = topology.host_of, Sent(topology.size)
    start = InProcessComm.start

    def counting(self, send, receive):
        for peer, messages in send.items():
            to = bytes_ if host_of[peer] != host_of[self.rank] else bytes_.inside
            to[self.rank] += sum(message.nbytes for message in messages)
        return start(self, send, receive)

    monkeypatch.setattr(InProcessComm, "start", counting)
    monkeypatch.setattr(InProcessComm, "costs", CostModel(topology=topology, held_shards=4.0))
    return bytes_


@pytest.mark.parametrize("crossed", HOSTS, indirect=True, ids=str)
def test_bytes_that_cross(crossed: Sent) -> None:
    """Keys and values of a causal mask cross once; so do the sums of their gradients. What moves
    inside hosts is what the plan says, too."""
    ranks, heads, dim = len(crossed), 2, 4
    total = 16 * ranks
    layout = Layout.zigzag(total, ranks)
    q, k, v = (torch.randn(1, total, heads, dim, dtype=torch.float64) for _ in range(3))

    def body(comm):
        mine = [layout.shard(t, comm.rank).requires_grad_() for t in (q, k, v)]
        out = wrap_ring_attn_func(*mine, causal=True, process_group=comm, layout=layout)
        forward = crossed[comm.rank], crossed.inside[comm.rank]
        comm.all_gather_object(None)
        out.sum().backward()
        return forward

    forward, inside = np.array(run_ranks(ranks, body)).T
    plan = make_plan(
        AttnMask.dense(total, causal=True),
        layout,
        assignment="auto",
        heads=(heads, heads),
        costs=InProcessComm.costs,
    )
    assert plan.topology is not None and not plan.rows_move
    tokens = plan.crossings[0].across[:, 0]
    assert (forward == tokens * 2 * heads * dim * 8).all()
    # Ranks of a host are taken to pass on as much as one another, in whole tokens.
    planned = plan.crossings[0].inside[:, 0] * 2 * heads * dim * 8
    off = np.bincount(plan.topology.host_of, inside - planned)
    assert (abs(off) <= np.array(plan.topology.hosts) * 2 * heads * dim * 8).all()
    hosts = len(plan.topology.hosts)
    # A host lacks the keys of others, the last no key after its last row.
    assert tokens.sum() <= total * (hosts - 1)
    assert sum(crossed.values()) == 3 * forward.sum()


def test_packed_documents(crossed: Sent) -> None:
    """Through the function that users call, with lengths that change."""
    generator = np.random.default_rng(0)
    for seed in range(10):
        total = int(generator.integers(20, 90))
        ends = np.sort(generator.integers(0, total + 1, 5)).tolist()
        bounds = torch.tensor([0, *ends, total], dtype=torch.int32)
        q, k, v = (torch.randn(total, 2, 4, dtype=torch.float64) for _ in range(3))
        layout = Layout.contiguous(total, 4)
        if seed % 2:
            mask = AttnMask.varlen(bounds.tolist(), causal=True)
            layout = Layout.balanced(mask, 4, topology=Topology((2, 2)))

        def body(comm, bounds=bounds, qkv=(q, k, v), layout=layout):
            mine = [layout.shard(t, comm.rank, 0).requires_grad_() for t in qkv]
            lengths = int(bounds.diff().max())
            out = wrap_ring_attn_varlen_func(
                *mine, bounds, bounds, None, causal=True, process_group=comm, layout=layout
            )
            assert lengths > 0
            out.square().sum().backward()
            return out.detach(), *(t.grad for t in mine)

        cut = [layout.unshard(parts, 0) for parts in zip(*run_ranks(4, body), strict=True)]
        alone = [t.clone().requires_grad_() for t in (q, k, v)]
        out = wrap_ring_attn_varlen_func(*alone, bounds, bounds, None, causal=True)
        out.square().sum().backward()
        for got, want in zip(cut, [out, *(t.grad for t in alone)], strict=True):
            torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    assert sum(crossed.values()) > 0
