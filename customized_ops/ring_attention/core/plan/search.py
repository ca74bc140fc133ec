"""The best plan among candidates, by the times that a cost model predicts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..layout import Layout, LayoutError
from ..mask import AttnMask
from .cost import CostModel, Pass
from .head_groups import best_head_groups
from .head_shares import head_shares
from .plan_value import PlanValue
from .work import ASSIGNMENTS, FEWER_BYTES

AnyPlan = TypeVar("AnyPlan", bound=PlanValue)

DIM, ITEMSIZE = 128, 2  # of a head, and of an element
# What differs by less than a twentieth is as fast.
AS_FAST = 0.95
# What the busiest link may do to spare a kernel call: be at work for HIDDEN of the two passes,
# which kernels do not feel, but no more than BUSIER times what it is at the least.
HIDDEN, BUSIER = 0.25, 1.5


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for; the arguments of :func:`.plan.make_plan`."""

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    assignment: str
    stages: int | None
    heads: tuple[int, int]
    team_size: int | None
    head_groups: int | None
    costs: CostModel

    def check(self) -> None:
        """Pass if there is such a plan; errors are those of :func:`.plan.make_plan`."""
        mask, q_layout, k_layout = self.mask, self.q_layout, self.k_layout
        if (q_layout.total, k_layout.total) != (mask.q_len, mask.k_len):
            raise LayoutError(
                f"the mask is {mask.q_len} queries x {mask.k_len} keys, but the layouts hold "
                f"{q_layout.total} and {k_layout.total} tokens"
            )
        if q_layout.group_size != k_layout.group_size:
            raise LayoutError(
                f"q lies on {q_layout.group_size} ranks and k on {k_layout.group_size}"
            )
        if self.stages is not None and self.stages < 0:
            raise ValueError(f"stages must be 0 or more, got {self.stages}")
        self._check_head_groups()
        if self.assignment not in ASSIGNMENTS:
            known = ", ".join(ASSIGNMENTS)
            raise ValueError(f"assignment must be one of {known}, got {self.assignment!r}")
        self._check_team_size()

    def _check_head_groups(self) -> None:
        groups, team_size = self.head_groups, self.team_size
        if groups is None:
            return
        if not 1 <= groups <= max(self.heads[1], 1):
            raise ValueError(
                f"head_groups must be 1 to the {self.heads[1]} key heads, got {groups}"
            )
        if groups > 1:
            if team_size != 1:
                raise ValueError(
                    f"head_groups={groups} needs team_size=1, got {team_size}: heads are split "
                    "between ranks or in groups, not both"
                )
            head_shares(*self.heads, groups)

    def _check_team_size(self) -> None:
        size, ranks, q_heads = self.team_size, self.q_layout.group_size, self.heads[0]
        if size is None:
            return
        if size < 1 or ranks % size or size > max(q_heads, 1):
            raise ValueError(
                f"team_size must divide the {ranks} ranks and be at most the {q_heads} query "
                f"heads, got {size}"
            )
        head_shares(*self.heads, size)


def best_plan(make: type[AnyPlan], request: PlanRequest) -> AnyPlan:
    """The best of all candidates, each an object of the class ``make``, the simplest first."""
    mask, q_layout, k_layout = request.mask, request.q_layout, request.k_layout
    (q_heads, kv_heads), ranks = request.heads, q_layout.group_size
    # A team shares out whole groups of heads; q cut on its heads alone has none.
    most = min(ranks, q_heads) if kv_heads and q_heads % kv_heads == 0 else 1
    sizes = [n for n in range(1, max(most, 1) + 1) if ranks % n == 0]
    rates = _Rates(request.costs, request.heads)
    plans: list[AnyPlan] = []
    for size in [request.team_size] if request.team_size else sizes:
        if plans and not rates.may_be_faster_split(plans):
            break
        row_cost = q_heads / max(kv_heads, size)  # a team receives a copy of a key for each rank
        works = ASSIGNMENTS[request.assignment](mask.slices, q_layout, k_layout, size, row_cost)
        steps = min(1 if request.stages is None else request.stages, max(ranks // size - 1, 1))
        plans += [make(mask, q_layout, k_layout, work, size, steps) for work in works]
    if request.stages is None:
        plans = [rates.staged_or_gathered(plan) for plan in plans]
    plans = [rates.in_head_groups(plan, request.head_groups) for plan in plans]
    return plans[0] if len(plans) == 1 else rates.best(plans)


@dataclass(frozen=True)
class _Rates:
    """What plans are compared by: times for so many query and key heads."""

    costs: CostModel
    heads: tuple[int, int]
    _passes: dict[PlanValue, tuple[Pass, Pass]] = field(default_factory=dict)

    def passes(self, plan: PlanValue) -> tuple[Pass, Pass]:
        """Forward and backward pass, counted once for each plan."""
        if plan not in self._passes:
            self._passes[plan] = self.costs.passes(plan, *self.heads, DIM, DIM, ITEMSIZE)
        return self._passes[plan]

    def seconds(self, plan: PlanValue) -> float:
        """Of a forward and a backward pass."""
        return sum(each.seconds for each in self.passes(plan))

    def may_be_faster_split(self, plans: list[AnyPlan]) -> bool:
        """Whether splitting heads could be worth it: not where one of ``plans`` is as fast as
        kernels alone, evenly loaded."""
        least = sum(float(each.compute.mean()) for each in self.passes(plans[0]))
        return least < AS_FAST * min(self.seconds(plan) for plan in plans)

    def staged_or_gathered(self, plan: AnyPlan) -> AnyPlan:
        """``plan``, or the same without stages where that is faster."""
        if plan.n_stages == 1 or not any(each.host_bound for each in self.passes(plan)):
            return plan  # gathering only spares calls
        gathered = replace(plan, steps=0, on_device={}, _ranks={})
        return gathered if self.seconds(gathered) < AS_FAST * self.seconds(plan) else plan

    def in_head_groups(self, plan: AnyPlan, count: int | None) -> AnyPlan:
        """``plan``, with keys that arrive in so many groups of heads, or as many as is best."""
        if plan.team_size > 1 or not plan.keys_move:
            return plan
        count = (
            best_head_groups(plan, self.passes(plan), self.costs, self.heads)
            if count is None
            else count
        )
        return plan if count == 1 else replace(plan, head_groups=count, on_device={}, _ranks={})

    def best(self, plans: list[AnyPlan]) -> AnyPlan:
        """Of the plans that are the fastest within a twentieth, those whose busiest link is well
        hidden behind kernels or hardly busier than the least busy one; of those one with the fewest
        calls, and of these the one with the least busy link. (Two H200s, contiguous shards of a
        causal mask: a call less was worth 0.6 to 6 % from 8k tokens to 64k, and 1.3 times the bytes
        cost nothing.)"""
        passes = [self.passes(plan) for plan in plans]
        seconds = [sum(each.seconds for each in both) for both in passes]
        link = [sum(float(each.link.max()) for each in both) for both in passes]
        fast = [n for n in range(len(plans)) if seconds[n] <= 1.05 * min(seconds)]
        least = min(link[n] for n in fast)
        most = min(max(least / FEWER_BYTES, HIDDEN * min(seconds)), BUSIER * least)
        light = [n for n in fast if link[n] <= most]
        return plans[min(light, key=lambda n: (plans[n].calls(self.heads[1]).max(), link[n]))]
