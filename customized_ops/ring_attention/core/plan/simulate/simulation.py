"""A plan's forward and backward in time."""

from __future__ import annotations

import numpy as np

from ..cost_model import CostModel
from ..heads import Sizes, TokenBytes
from ..plan_value import PlanValue
from .counts import counts
from .ranks import Ranks
from .schedule import PassWork, Schedule
from .timeline import Timeline


def simulate(
    plan: PlanValue,
    sizes: Sizes,
    costs: CostModel,
    reduce_itemsize: int | None = None,
    batch: int = 1,
) -> Timeline:
    """When every rank does what in a forward and in a backward, by the rates of ``costs``.

    Ranks follow the executor's program. Kernels wait for keys and rows, messages for their senders
    (and, where they are not one-sided writes, for their receivers), a link carries one exchange
    after the other, and hosts start one kernel call after the other. A pass is over when the
    slowest rank has its results. Each rank's pairs and messages are those of the plan.

    Args:
        costs: rates; its topology, or else the plan's, says which links are between hosts.
        reduce_itemsize: as for :meth:`.PlanValue.backward_bytes`.
        batch: entries of the batch.
    Raises:
        ValueError: these heads cannot be split as the plan says; see :func:`.head_shares`.
    """
    shares = plan.heads_of_ranks(sizes.q_heads, sizes.kv_heads)
    topology = costs.topology or plan.topology
    host_of = np.zeros(plan.group_size, np.int64) if topology is None else topology.host_of
    one_sided = costs.one_sided and not (host_of.any() or plan.held_keys)
    groups, counted = min(plan.head_groups, int(shares[:, 1].max())), counts(plan)
    forward, backward = (
        Schedule(plan, counted, groups, work, Ranks(costs, host_of, one_sided=one_sided)).run()
        for work in _work(plan, sizes, costs, reduce_itemsize, batch)
    )
    flops = 2.0 * (sizes.head_dim + sizes.v_dim) * sizes.q_heads * plan.mask.area * batch
    return Timeline(forward, backward, flops / plan.group_size)


def _work(
    plan: PlanValue, sizes: Sizes, costs: CostModel, reduce_itemsize: int | None, batch: int
) -> tuple[PassWork, PassWork]:
    """The work of the forward and of the backward."""
    shares = plan.heads_of_ranks(sizes.q_heads, sizes.kv_heads)
    home = plan.home_itemsize(sizes, reduce_itemsize)
    narrow, wide, (_, _, dim, v_dim, _) = sizes.itemsize, sizes.wide_itemsize, sizes
    h = shares[:, 0].astype(np.float64)
    seconds = costs.attend_seconds(batch, h, dim, v_dim)
    merges = np.array(sizes.merge_bytes(shares[:, 0]), dtype=np.float64) * batch
    forward = PassWork(
        pair_seconds=seconds[0],
        token_bytes=_of_batch(TokenBytes.forward(sizes, shares), batch),
        merge_bytes=merges[0],
        beside_bytes=h * v_dim * 2.0 * narrow * batch,
        add=1 + 2 * wide / narrow,
    )
    backward = PassWork(
        pair_seconds=seconds[1],
        token_bytes=_of_batch(TokenBytes.backward(sizes, shares, home), batch),
        merge_bytes=merges[1],
        beside_bytes=h * dim * 2.0 * narrow * batch,
        add=1 + 2 * wide / home,
    )
    return forward, backward


def _of_batch(each: TokenBytes, batch: int) -> TokenBytes:
    return TokenBytes(*(tokens * batch for tokens in each))
