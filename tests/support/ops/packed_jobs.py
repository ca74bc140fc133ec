"""Random batches of packed documents, and a job that attends them; see ``ranks.Pool``."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    make_plan,
    packed_batches,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
)
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name, group_costs
from customized_ops.ring_attention.core.comm.dist_comm import COSTS as RATES
from customized_ops.ring_attention.core.comm.dist_comm import HOSTS, DistComm
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.plan import Plan
from customized_ops.ring_attention.core.plan import plan as plans
from customized_ops.ring_attention.core.plan.choose import plan_request
from customized_ops.ring_attention.core.topology import Topology
from customized_ops.ring_attention.op import bound, window_source
from customized_ops.ring_attention.op.tokens import call_layouts

HEADS = (4, 2)
# What a step costs decides whether rows are given away, and whether ranks share out heads; of
# sequences this short they do not, as long as kernels are fast.
COSTS = (
    H200,
    CostModel(forward_flops=1e6, backward_flops=1e6, call_seconds=0.0),
    CostModel(1e9, 1e9, link_bytes=2e7, step_seconds=0.0, call_seconds=0.0),
)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often inside a layout, a mask and a plan of documents are made."""
    counts = {"layouts": 0, "masks": 0, "plans": 0}

    def counting(name: str, made: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return made(*args, **kwargs)

        return count

    with (
        patch.object(Layout, "balanced", counting("layouts", Layout.balanced)),
        patch.object(AttnMask, "varlen", counting("masks", AttnMask.varlen)),
        patch.object(plans, "best_plan", counting("plans", plans.best_plan)),
    ):
        yield counts


def forget_batches() -> None:
    """As in a process in which no batch was made."""
    for known in (plans._PLANS, plans.AHEAD, plans._LAST, window_source._MASKS):
        known.clear()
    call_layouts._BALANCED.clear()
    bound._bound.clear()


def tensors(batch: Any, seed: int) -> list[torch.Tensor]:
    draw, total = torch.Generator().manual_seed(seed), batch.layout.total
    return [torch.randn(total, h, 8, generator=draw).double() for h in (4, 2, 2)]


def drawn(seed: int) -> tuple[list[list[int]], int, dict[str, Any]]:
    """Documents of no token and of one, one document, fewer than ranks, all short, one that is
    longer than all others; ranks; how they attend."""
    draw = np.random.default_rng(seed)
    most = int(draw.choice([1, 4, 16, 40]))
    lengths = draw.integers(0, most + 1, draw.integers(1, 14))
    if draw.random() < 0.4:
        lengths[draw.integers(len(lengths))] += int(lengths.sum()) + 1
    lengths[0] += lengths.sum() == 0
    left = int(draw.integers(0, 9)) if draw.random() < 0.3 else -1
    how = {
        "causal": bool(draw.random() < 0.8),
        "window_size": (left, -1),
        "layout": str(draw.choice(["balanced", "contiguous"])),
    }
    return [[7] * n for n in lengths.tolist()], int(draw.integers(1, 9)), how


def group_over(hosts: str, rates: str) -> tuple[dist.ProcessGroup, CostModel]:
    """A group of all ranks, which count as on ``hosts``, with messages inside and between them; and
    its costs, with ``rates``."""
    group = dist.new_group(list(range(dist.get_world_size())))
    with patch.dict(os.environ, {HOSTS: hosts, RATES: rates}):
        comm = comm_by_name(group.group_name)
    comm._of_cpus = comm.ways_apart()  # as GPUs have
    for way in comm._of_cpus:
        way.introduce(comm.rank, torch.device("cpu"))
    assert comm.costs.topology == Topology.parse(hosts)
    return group, comm.costs


def random_batches(seeds: Sequence[int], hosts: str = "") -> float:
    """The largest error of this rank's rows of a result or gradient, over drawn batches; with
    ``hosts``, as ``SEQSHARD_HOSTS`` has them, of ranks that count as on so many."""
    size, rank, largest = dist.get_world_size(), dist.get_rank(), 0.0
    group, of_hosts = dist.group.WORLD, None
    if hosts:
        group, of_hosts = group_over(hosts, "held_shards=0.5")
    for seed in seeds:
        given, _, how = drawn(seed)
        costs = of_hosts or COSTS[seed % len(COSTS)]
        packed = {"ranks": size, "rank": rank, "heads": HEADS, "costs": costs, **how}
        batch = next(packed_batches([given], **packed))
        whole, cu, lay = tensors(batch, seed), batch.cu_seqlens, batch.layout
        masked = {"causal": how["causal"], "window_size": how["window_size"]}
        results = []
        for cut in (False, True):
            leaves = [lay.shard(t, rank, dim=0) if cut else t.clone() for t in whole]
            q, k, v = (t.requires_grad_() for t in leaves)
            where = {"process_group": group, "layout": lay} if cut else {}
            with patch.object(DistComm, "costs", costs):
                out = wrap_ring_attn_varlen_func(q, k, v, cu, cu, **masked, **where)
                out.square().sum().backward()
            results.append((out.detach(), q.grad, k.grad, v.grad))
        for one, here in zip(*results, strict=True):
            assert one is not None and here is not None
            wanted = lay.shard(one, rank, dim=0)
            assert here.shape == wanted.shape
            if len(here):
                scale = max(1.0, one.abs().max().item())
                largest = max(largest, (here - wanted).abs().max().item() / scale)
    return largest


def random_batches_in_steps(seeds: Sequence[int], hosts: str) -> tuple[float, int, int]:
    """:func:`random_batches` over hosts where also few keys are a bound; and the most stages and
    groups of heads of a plan."""
    ranks_of_plans, stages, groups = Plan.rank, [0], [0]

    def noted(plan: Plan, rank: int) -> Any:
        stages.append(plan.n_stages)
        groups.append(plan.head_groups)
        return ranks_of_plans(plan, rank)

    with patch.object(plan_request, "HELD_BYTES", 1), patch.object(Plan, "rank", noted):
        return random_batches(seeds, hosts), max(stages), max(groups)


def on_a_grid(hosts: str, rates: str) -> tuple[float, Plan]:
    """The largest error of causal attention over ``hosts``, and the plan that it took."""
    group, costs = group_over(hosts, rates)
    size, rank, draw = dist.get_world_size(), dist.get_rank(), torch.Generator().manual_seed(0)
    total = 20 * size + 3
    layout, largest = Layout.zigzag(total, size), 0.0
    whole = [torch.randn(2, total, h, 8, generator=draw).double() for h in (2, 2, 2, 2)]
    results = []
    for cut in (False, True):
        leaves = [layout.shard(t, rank) if cut else t.clone() for t in whole]
        q, k, v = (t.requires_grad_() for t in leaves[:3])
        where = {"process_group": group, "layout": layout} if cut else {}
        out = wrap_ring_attn_func(q, k, v, causal=True, **where)
        out.backward(leaves[3])
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for one, here in zip(*results, strict=True):
        assert one is not None and here is not None
        largest = max(largest, float((layout.shard(one, rank) - here).abs().max()))
    given = {"heads": (2, 2), "head_dim": 8, "batch": 2, "costs": costs, "team_size": None}
    return largest, make_plan(AttnMask.causal(total), layout, **given)


def hosts_found(
    names: Sequence[str], given: str | None = None
) -> tuple[Topology | None, float, list[str]]:
    """The hosts of a group whose ranks are on several, as torchrun and their ``names`` say, or
    SEQSHARD_HOSTS; how many shards they may hold, and what the package warns of."""
    rank, group = dist.get_rank(), dist.new_group(list(range(dist.get_world_size())))
    host = patch.object(socket, "gethostname", lambda: names[rank])
    said = {"SEQSHARD_HOSTS": given} if given else {}
    several = patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", **said})
    with host, several, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        costs = comm_by_name(group.group_name).costs
    ours = [str(each.message) for each in told if "seqshard" in str(each.message)]
    return costs.topology, costs.held_shards, ours


def hosts_given(variables: Sequence[str], *arguments: str | None) -> list[str]:
    """What a group whose rank n has ``variables[n]`` as SEQSHARD_HOSTS, if not empty, is used over,
    or the error; for each of ``arguments`` in turn."""
    found = []
    group = dist.new_group(range(dist.get_world_size()))
    with patch.dict(os.environ, {HOSTS: variables[dist.get_rank()]}):
        for hosts in arguments or [None]:
            try:
                found.append(str(group_costs(group, hosts).topology))
            except ValueError as error:
                found.append(str(error).replace(repr(group.group_name), "'group'"))
    return found
