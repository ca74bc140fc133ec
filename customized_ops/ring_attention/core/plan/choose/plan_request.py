"""The request that a plan is made for."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ...layout import Layout, LayoutError
from ...mask import AttnMask
from ..assign.work import Work
from ..cost_model import HELD_BYTES, HELD_SHARDS, CostModel
from ..heads import Sizes, head_shares, largest_share
from ..plan_value import PlanValue


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for: the arguments of :func:`.plan.make_plan`.

    Attributes:
        head_dims: dims of a head of q and k, and of v, times the entries of a batch: more entries
            take as long as larger heads.
        itemsize: bytes of an element of q, k and v.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    assignment: str
    stages: int | None
    heads: tuple[int, int]
    team_size: int | None
    head_groups: int | None
    costs: CostModel
    head_dims: tuple[int, int] = (128, 128)
    itemsize: int = 2

    @property
    def sizes(self) -> Sizes:
        """The sizes by which plans are compared. Kernel rates are those of 16-bit elements,
        whatever ``itemsize`` is; bytes follow ``itemsize``."""
        return Sizes(*self.heads, *self.head_dims, self.itemsize)

    def check(self, assignments: Collection[str]) -> None:
        """Check that there is such a plan, with one of these ``assignments``; errors are those of
        :func:`.plan.make_plan`."""
        mask, q_layout, k_layout = self.mask, self.q_layout, self.k_layout
        require_costs("make_plan", self.costs)
        if not isinstance(mask, AttnMask):
            raise ValueError(f"make_plan: mask must be an AttnMask, got {mask!r}")
        for layout in (q_layout, k_layout):
            if not isinstance(layout, Layout):
                raise LayoutError(f"make_plan: layouts must be Layouts, got {layout!r}")
        if (q_layout.total, k_layout.total) != (mask.q_len, mask.k_len):
            raise LayoutError(
                f"the mask is {mask.q_len} queries x {mask.k_len} keys, but the layouts hold "
                f"{q_layout.total} and {k_layout.total} tokens"
            )
        if q_layout.group_size != k_layout.group_size:
            raise LayoutError(f"q is on {q_layout.group_size} ranks and k on {k_layout.group_size}")
        for name in ("stages", "team_size", "head_groups"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Integral):
                raise ValueError(f"{name} must be an integer, or None for the best, got {value!r}")
        if self.stages is not None and self.stages < 0:
            raise ValueError(f"stages must be 0 or more, got {self.stages}")
        if self.assignment not in assignments:
            known = ", ".join(assignments)
            raise ValueError(f"assignment must be one of {known}, got {self.assignment!r}")
        if min(self.head_dims) < 1:
            raise ValueError(f"head dims times batch must be 1 or more, got {self.head_dims}")
        if self.itemsize < 1:
            raise ValueError(f"itemsize must be 1 byte or more, got {self.itemsize}")
        self._check_heads()
        topology, ranks = self.costs.topology, q_layout.group_size
        if topology is not None and topology.size != ranks:
            raise ValueError(f"hosts {topology} have {topology.size} ranks, the layout {ranks}")

    def _check_heads(self) -> None:
        (q_heads, kv_heads), ranks = self.heads, self.q_layout.group_size
        if min(self.heads) < 0:
            raise ValueError(f"heads must be 0 or more, got {self.heads}")
        groups, size = self.head_groups or 1, self.team_size
        if self.head_groups is not None and not 1 <= self.head_groups <= max(kv_heads, 1):
            raise ValueError(
                f"head_groups must be 1 to the {kv_heads} key heads, got {self.head_groups}"
            )
        if groups > 1 and size != 1:
            raise ValueError(
                f"head_groups={groups} needs team_size=1, got {size}: heads are split between "
                "ranks or in groups, not both"
            )
        if size is not None and (size < 1 or ranks % size or size > max(q_heads, 1)):
            raise ValueError(
                f"team_size must divide the {ranks} ranks and be at most the {q_heads} query "
                f"heads, got {size}"
            )
        head_shares(*self.heads, max(groups, size or 1))

    def plan_of(self, work: Work, team_size: int, blocks: int = 1) -> PlanValue:
        """The plan of some work, whose keys arrive as :meth:`arrangement` says. On a grid, of more
        ``blocks`` than one, what a rank holds of others' rows leaves it less memory for keys, but
        at least a quarter."""
        of, arranged = (self.mask, self.q_layout, self.k_layout), self.arrangement(team_size)
        plan = PlanValue(*of, work, team_size, **arranged, blocks=blocks)
        if blocks == 1 or plan.held_keys == 0:
            return plan
        left = plan.held_keys - self._rows_as_keys(plan)
        return plan.variant(held_keys=max(left, plan.held_keys // 4, 1))

    def has_room(self, plan: PlanValue) -> bool:
        """Whether what a rank holds of others' rows leaves a quarter of its memory, or more."""
        held = self.arrangement(plan.team_size).get("held_keys", 0)
        return held == 0 or 4 * self._rows_as_keys(plan) <= 3 * held

    def _rows_as_keys(self, plan: PlanValue) -> int:
        """The most rows of others that a rank holds, with their results, as keys with as many
        bytes, of its share of the heads."""
        share = largest_share(*self.heads, plan.team_size)
        row = self.sizes.held_row_bytes(share.q_heads)
        return -(-plan.rows_of_others * row // self.sizes.kv_bytes(max(share.kv_heads, 1)))

    def arrangement(self, team_size: int) -> dict[str, Any]:
        """How keys arrive at ranks in teams, as fields of a plan: in how many steps, unless
        gathering them is faster, over which hosts, and how many are held at once."""
        teams = self.q_layout.group_size // team_size
        steps = min(1 if self.stages is None else self.stages, max(teams - 1, 1))
        topology = self.costs.topology
        if topology is not None and (
            len(topology.hosts) == 1 or math.gcd(*topology.hosts) % team_size
        ):
            topology = None  # nothing crosses hosts, or teams do
        key_bytes = self.sizes.kv_bytes(max(self.heads[1] // team_size, 1))
        shard, shards = max(self.k_layout.sizes), self.costs.held_shards
        if math.isinf(shards):
            others = (self.k_layout.total - shard) * key_bytes
            if others <= self.costs.gathered_bytes:
                return {"steps": steps, "topology": topology}
            shards = HELD_SHARDS
        # With only a rank's share of the heads, a shard's bytes hold team_size times as many keys.
        held = max(int(shards * shard * team_size), HELD_BYTES // key_bytes)
        return {"steps": steps, "topology": topology, "held_keys": held}


def require_costs(title: str, costs: object) -> None:
    """Raise a TypeError that begins with ``title`` for what is not a CostModel."""
    if not isinstance(costs, CostModel):
        raise TypeError(
            f"{title}: costs must be a CostModel, such as CostModel.over('4x8') or "
            f"group_costs(group), got {costs!r}"
        )
