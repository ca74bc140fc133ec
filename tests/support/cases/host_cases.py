"""Plans over several hosts, drawn."""

from __future__ import annotations

import random

import numpy as np

from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL, CostModel
from customized_ops.ring_attention.core.topology import Topology

HOSTS = [(2,) * 4, (4, 4), (3, 1), (3, 3), (2, 2, 2), (1, 2, 3), (1, 1, 1), (2, 3)]


def costs_over(hosts: tuple[int, ...], held_shards: float = 4.0) -> CostModel:
    return CostModel(
        link_bytes=H200_NCCL.link_bytes, topology=Topology(hosts), held_shards=held_shards
    )


def bounded(plan: Plan, held_keys: int, head_groups: int = 1) -> Plan:
    """The same plan with a bound of few keys, which are too few to be one by default."""
    given = (plan.mask, plan.q_layout, plan.k_layout, plan.work, plan.team_size, plan.steps)
    groups = head_groups if plan.team_size == 1 else 1
    return Plan(*given, groups, topology=plan.topology, held_keys=held_keys)


def drawn(source: random.Random, ranks: int) -> tuple[AttnMask, Layout]:
    total = source.randrange(ranks, 200)
    cuts = sorted({0, total, *(source.randrange(1, total) for _ in range(source.randrange(6)))})
    masks = [
        lambda: AttnMask.dense(total, causal=True),
        lambda: AttnMask.dense(total),
        lambda: AttnMask.varlen(cuts, causal=True),
    ]
    bounds = sorted(source.randrange(total + 1) for _ in range(ranks - 1))
    layouts = [
        lambda: Layout.contiguous(total, ranks),
        lambda: Layout.zigzag(total, ranks),
        lambda: Layout.striped(total, ranks),
        lambda: Layout.from_sizes(np.diff([0, *bounds, total]).tolist()),
    ]
    return source.choice(masks)(), source.choice(layouts)()


def drawn_plan(source: random.Random) -> Plan:
    """Of several hosts, with a bound of few keys or none, or of one with links that are alike."""
    hosts = source.choice(HOSTS)
    mask, layout = drawn(source, sum(hosts))
    plan = make_plan(
        mask,
        layout,
        stages=source.choice([None, 0, 1, 2]),
        assignment=source.choice(["owner", "balanced", "shared", "auto", "tiled"]),
        team_size=2 if sum(hosts) % 2 == 0 and source.random() < 0.3 else 1,
        costs=costs_over(hosts) if source.random() < 0.8 else CostModel(),
    )
    return bounded(plan, source.choice([0, max(10, mask.q_len // 8)]), source.choice([1, 1, 2]))
