"""The best plan among candidates, by the times that a cost model predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..layout import Layout, LayoutError
from ..mask import AttnMask
from ..mask.slices import Slices
from .cost import CostModel, Pass
from .even_work import evened, shared
from .head_groups import best_head_groups
from .heads import Sizes, head_shares
from .plan_value import PlanValue
from .work import FEWER_BYTES, Work, area_per_team, nearest, owned

AnyPlan = TypeVar("AnyPlan", bound=PlanValue)
Works = list[Work]

# What differs by less than a twentieth is as fast.
AS_FAST = 0.95
# What the busiest link may do to spare a kernel call: be at work for HIDDEN of the two passes,
# which kernels do not feel, but no more than BUSIER times what it is at the least.
HIDDEN, BUSIER = 0.25, 1.5


def _owner(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [owned(slices, q_layout, team)]


def _balanced(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [evened(owned(slices, q_layout, team), q_layout, team)]


def _nearest(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    work = nearest(owned(slices, q_layout, team), k_layout, team, cost)
    return [evened(work, q_layout, team)]


def _auto(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    at_home = owned(slices, q_layout, team)
    near = nearest(at_home, k_layout, team, cost)
    even = [work for work in (at_home, near) if _is_even(work, q_layout.group_size // team)]
    if even and even[0] is at_home:  # made even it is as fast, with more calls and bytes
        return _distinct(even)
    both = shared(at_home, q_layout, k_layout, team)
    evens = [evened(work, q_layout, team) for work in _distinct([at_home, near, both])]
    return _distinct([at_home, *evens])


def _is_even(work: Work, teams: int) -> bool:
    area = area_per_team(work, teams)
    return bool(area.max(initial=0) * AS_FAST <= area.mean())


def _distinct(works: Works) -> Works:
    """Without what is there already; a step that had nothing to do returns what it was given."""
    return [work for n, work in enumerate(works) if all(work is not other for other in works[:n])]


def _shared(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [evened(shared(owned(slices, q_layout, team), q_layout, k_layout, team), q_layout, team)]


def _zigzag(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [owned(slices, Layout.zigzag(q_layout.total, q_layout.group_size), team)]


# Ways to assign work, by name: the mask's slices, q layout, k layout, ranks in a team and cost of
# a row (see :func:`.work.nearest`) -> candidates, the simplest first.
ASSIGNMENTS: dict[str, Callable[[Slices, Layout, Layout, int, float], Works]] = {
    "auto": _auto,
    "owner": _owner,
    "balanced": _balanced,
    "nearest": _nearest,
    "shared": _shared,
    "zigzag": _zigzag,
}


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
            raise LayoutError(f"q is on {q_layout.group_size} ranks and k on {k_layout.group_size}")
        if self.stages is not None and self.stages < 0:
            raise ValueError(f"stages must be 0 or more, got {self.stages}")
        if self.assignment not in ASSIGNMENTS:
            known = ", ".join(ASSIGNMENTS)
            raise ValueError(f"assignment must be one of {known}, got {self.assignment!r}")
        self._check_heads()

    def _check_heads(self) -> None:
        (q_heads, kv_heads), ranks = self.heads, self.q_layout.group_size
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


# What a plan works out of its work and its layouts alone.
OF_WORK = (
    *("q_needed", "kv_needed", "_tokens", "rows_move", "keys_move", "shared_rows", "area"),
    *("kinds_of_calls", "area_over_own_keys", "rows_over_others_keys"),
)


def _variant(plan: AnyPlan, **changes: Any) -> AnyPlan:
    """The same work with other ``steps`` or ``head_groups``; what is known of it stays known."""
    other = replace(plan, made={}, _ranks={}, **changes)
    vars(other).update((name, vars(plan)[name]) for name in OF_WORK if name in vars(plan))
    return other


@dataclass(frozen=True)
class _Rates:
    """What plans are compared by: times for so many query and key heads."""

    costs: CostModel
    heads: tuple[int, int]
    _passes: dict[PlanValue, tuple[Pass, Pass]] = field(default_factory=dict)

    def passes(self, plan: PlanValue) -> tuple[Pass, Pass]:
        """Forward and backward pass, counted once for each plan."""
        if plan not in self._passes:
            self._passes[plan] = self.costs.passes(plan, *Sizes.usual(self.heads))
        return self._passes[plan]

    def seconds(self, plan: PlanValue) -> float:
        """Of a forward and a backward pass."""
        return sum(each.seconds for each in self.passes(plan))

    def may_be_faster_split(self, plans: list[AnyPlan]) -> bool:
        """Whether splitting heads could be worth it: not where one of ``plans`` is as fast as
        kernels alone, evenly loaded, and started in one call."""
        call = self.costs.call_seconds
        least = sum(max(float(each.compute.mean()), call) for each in self.passes(plans[0]))
        return least < AS_FAST * min(self.seconds(plan) for plan in plans)

    def staged_or_gathered(self, plan: AnyPlan) -> AnyPlan:
        """``plan``, or the same without stages where that is faster."""
        if plan.n_stages == 1 or not any(each.host_bound for each in self.passes(plan)):
            return plan  # gathering only spares calls
        gathered = _variant(plan, steps=0)
        return gathered if self.seconds(gathered) < AS_FAST * self.seconds(plan) else plan

    def in_head_groups(self, plan: AnyPlan, count: int | None) -> AnyPlan:
        """``plan``, with keys that arrive in so many groups of heads, or as many as is best."""
        if plan.team_size > 1 or not plan.keys_move:
            return plan
        if count is None:
            count = best_head_groups(plan, self.passes(plan), self.costs, self.heads)
        return plan if count == 1 else _variant(plan, head_groups=count)

    def best(self, plans: list[AnyPlan]) -> AnyPlan:
        """Of the plans that are the fastest within a twentieth, those whose busiest link is well
        hidden behind kernels or hardly busier than the least busy one; of those one with the fewest
        calls, and of these the one with the least busy link. (Two H200s, contiguous shards of a
        causal mask: a call less was worth 0.6 to 6 % from 8k tokens to 64k, and 1.3 times the bytes
        cost nothing.)"""
        seconds = [self.seconds(plan) for plan in plans]
        link = [sum(float(each.link.max()) for each in self.passes(plan)) for plan in plans]
        fast = [n for n in range(len(plans)) if seconds[n] <= 1.05 * min(seconds)]
        least = min(link[n] for n in fast)
        most = min(max(least / FEWER_BYTES, HIDDEN * min(seconds)), BUSIER * least)
        light = [n for n in fast if link[n] <= most]
        return plans[min(light, key=lambda n: (plans[n].calls(self.heads[1]).max(), link[n]))]
