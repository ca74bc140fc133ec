"""A plan in figures, next to bounds that no plan can beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...arrays import Ints
from ..bounds import Bounds, lower_bounds
from ..cost_model import H200, CostModel, Pass
from ..heads import Sizes
from ..plan_value import PlanValue
from ..simulate.counts import REMOTE, counts

# Up to this many ranks the slices of each are counted: for more it takes long.
MOST_WITH_SLICES = 64


@dataclass(frozen=True)
class Measures:
    """A plan's figures. Those of a rank are for its share of the heads.

    Attributes:
        tokens: int64[P]: rows that each rank holds.
        pairs: int64[P]: that each rank computes.
        away_pairs: int64[P]: those of them whose row another rank holds.
        calls: int64[P]: kernel calls in the forward pass.
        slices: int64[P]: slices in them; None for more than MOST_WITH_SLICES ranks.
        kv_received, rows_received: int64[P]: tokens received in the forward pass.
        sent_bytes, received_bytes: int64[P]: forward, batch 1.
        bounds: on ``pairs`` and ``received_bytes``.
        forward, backward: predicted times.
        imbalance: pairs times heads of the largest rank over the mean; 1 where there are none.
    """

    tokens: Ints
    pairs: Ints
    away_pairs: Ints
    calls: Ints
    slices: Ints | None
    kv_received: Ints
    rows_received: Ints
    sent_bytes: Ints
    received_bytes: Ints
    bounds: Bounds
    forward: Pass
    backward: Pass
    imbalance: float

    @property
    def pairs_gap(self) -> float:
        """Pairs of the largest rank over the least possible."""
        return over_least(self.pairs.max(), self.bounds.pairs)

    @property
    def bytes_gap(self) -> float:
        """Bytes that all ranks receive over the least possible; infinite where that is 0."""
        return over_least(self.received_bytes.sum(), self.bounds.total)

    @property
    def busiest_gap(self) -> float:
        """The same for the rank that receives most."""
        return over_least(self.received_bytes.max(), self.bounds.busiest)


def over_least(value: float, least: float) -> float:
    """A figure over its bound; 1 where both are 0."""
    if least:
        return float(value / least)
    return float("inf") if value else 1.0


def measures(
    plan: PlanValue,
    q_heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 1,
    v_dim: int | None = None,
    itemsize: int = 2,
    costs: CostModel = H200,
    reduce_itemsize: int | None = None,
) -> Measures:
    """The figures of ``plan`` for tensors of these sizes, batch 1.

    Args:
        itemsize: bytes per element of q, k and v.
        costs: rates by which times are predicted.
        reduce_itemsize: as for :meth:`.PlanValue.backward_bytes`.
    Raises:
        ValueError: the plan splits heads more ways than there are; see :func:`.head_shares`.
    """
    sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
    moved = plan.forward_bytes(*sizes)
    counted, slices = counts(plan), None
    calls = (counted.pairs > 0).sum(axis=1)  # of each stage and rank
    groups = min(plan.head_groups, kv_heads)
    times = np.array([1 if keys is None else groups for keys in counted.keys])
    if plan.group_size <= MOST_WITH_SLICES:
        apart = plan.variant()  # so that the plan need not keep, and pickle, all ranks' parts
        stages = [apart.rank(rank).stages for rank in range(plan.group_size)]
        slices = np.array([sum(len(s.own) + len(s.remote) for s in each) for each in stages])
    forward, backward = costs.passes(plan, *sizes, reduce_itemsize)
    return Measures(
        tokens=np.array(plan.q_layout.sizes),
        pairs=plan.area,
        away_pairs=counted.pairs[:, REMOTE].sum(axis=0),
        calls=times @ calls,
        slices=slices,
        kv_received=plan.kv_tokens()[:, 1],
        rows_received=plan.q_tokens()[:, 1],
        sent_bytes=moved[:, 0],
        received_bytes=moved[:, 1],
        bounds=lower_bounds(plan, sizes),
        forward=forward,
        backward=backward,
        imbalance=plan.imbalance(q_heads, kv_heads),
    )
