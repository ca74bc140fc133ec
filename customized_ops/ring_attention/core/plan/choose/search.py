"""The best plan among candidates, by the times that a cost model predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...layout import Layout
from ...mask.slices import Slices
from ..assign.even_work import evened, shared
from ..assign.tiled_work import numbers_of_blocks, tiled
from ..assign.work import FEWER_BYTES, Work, area_per_team, nearest, owned
from ..plan_value import PlanValue
from .document_plan import document_plan, is_good, is_of_documents
from .plan_request import PlanRequest
from .rates import AS_FAST, Rates, is_even

Works = list[Work]

# How busy the busiest link may be to save a kernel call: for HIDDEN of the two passes, which
# kernels do not feel, but for no more than BUSIER times the least possible.
HIDDEN, BUSIER = 0.25, 1.5
# Grids are looked at further where the cost model gives them at most so many times the best time.
LIKELY = 1.5
# Up to this many ranks, plans of documents are searched, too; for 1,024 it takes over a second.
SEARCHED_RANKS = 256


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
    teams = q_layout.group_size // team
    even = [work for work in (at_home, near) if is_even(area_per_team(work, teams))]
    if even and even[0] is at_home:  # evened out it is as fast, with more calls and bytes
        return _distinct(even)
    both = shared(at_home, q_layout, k_layout, team)
    evens = [evened(work, q_layout, team) for work in _distinct([at_home, near, both])]
    return _distinct([at_home, *evens])


def _distinct(works: Works) -> Works:
    """``works`` without duplicates; a step that had nothing to do returns what it was given."""
    return [work for n, work in enumerate(works) if all(work is not other for other in works[:n])]


def _shared(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [evened(shared(owned(slices, q_layout, team), q_layout, k_layout, team), q_layout, team)]


def _zigzag(slices: Slices, q_layout: Layout, k_layout: Layout, team: int, cost: float) -> Works:
    return [owned(slices, Layout.zigzag(q_layout.total, q_layout.group_size), team)]


# Ways to assign work, by name: the mask's slices, q layout, k layout, ranks in a team and cost of
# a row (see :func:`.work.nearest`) -> candidates, the simplest first. Plans on a grid are made by
# :func:`_on_grids`, and are balanced where there is none.
ASSIGNMENTS: dict[str, Callable[[Slices, Layout, Layout, int, float], Works]] = {
    "auto": _auto,
    "owner": _owner,
    "balanced": _balanced,
    "nearest": _nearest,
    "shared": _shared,
    "zigzag": _zigzag,
    "tiled": _balanced,
}


def best_plan(request: PlanRequest) -> PlanValue:
    """For packed documents a plan by construction, for other masks the best of all candidates.
    Candidates are tried for documents, too, where links are too slow for a construction that is
    about kernels, as other candidates send rows to the keys."""
    rates = Rates(request.costs, request.sizes)
    if request.assignment == "auto" and is_of_documents(request):
        plan = document_plan(request, rates)
        if is_good(plan, rates) or plan.group_size > SEARCHED_RANKS:
            return plan
        return min(plan, searched_plan(request, rates), key=rates.seconds)
    if rates.ask_simulator(request.q_layout.group_size):
        sizes = _team_sizes(request, rates)
        plans = [plan for size in sizes for plan in _candidates(request, size)]
        plans = [rates.arranged(plan, request) for plan in plans]
        plans += _grids(rates.fastest(plans), request, rates)
        best = rates.fastest(plans)
        # Plans that split heads compete with all variants of one that does not.
        whole = [plan for plan in plans if plan.team_size == 1]
        other = [rates.fastest(whole)] if whole and best.team_size > 1 else []
        return rates.fastest([rates.fastest(rates.like(each, request)) for each in (best, *other)])
    return searched_plan(request, rates)


def searched_plan(request: PlanRequest, rates: Rates) -> PlanValue:
    """The best of all candidates by the cost model; no more are made once one is as fast as
    kernels."""
    plans: list[PlanValue] = []
    for size in _team_sizes(request, rates):
        if plans and rates.is_fast(*plans):
            break
        plans += _candidates(request, size)
    plans = [rates.arranged(plan, request) for plan in plans]
    best = _best(plans, rates)
    grids = _grids(best, request, rates)
    if not grids:
        return best
    if rates.ask_simulator(request.q_layout.group_size // 2):  # as there are only a few plans
        return rates.fastest([best, *grids])
    faster = [plan for plan in grids if rates.seconds(plan) < AS_FAST * rates.seconds(best)]
    return _best(faster or [best], rates)


def _grids(best: PlanValue, request: PlanRequest, rates: Rates) -> list[PlanValue]:
    """Plans in which rows and keys both move, where the busiest link is busy for longer than
    kernels in the best plan without: in teams of the same size, and in the largest. Documents have
    no use for them, as ranks attend few others."""
    slow = any(float(each.link.max()) > float(each.compute.max()) for each in rates.passes(best))
    if request.assignment != "auto" or not slow or is_of_documents(request):
        return []
    sizes = sorted({best.team_size, max(_team_sizes(request, rates))})
    plans = [plan for size in sizes for plan in _on_grids(request, size) if request.has_room(plan)]
    plans = [rates.arranged(plan, request) for plan in plans]
    return [plan for plan in plans if rates.seconds(plan) < LIKELY * rates.seconds(best)]


def _team_sizes(request: PlanRequest, rates: Rates) -> Iterable[int]:
    return (
        [request.team_size] if request.team_size else rates.team_sizes(request.q_layout.group_size)
    )


def _candidates(request: PlanRequest, size: int) -> list[PlanValue]:
    """Plans with teams of one size, the simplest first, before it is chosen how keys arrive."""
    if request.assignment == "tiled" and (grids := _on_grids(request, size)):
        return [plan for plan in grids if request.has_room(plan)] or grids[:1]
    mask, q_layout, k_layout = request.mask, request.q_layout, request.k_layout
    q_heads, kv_heads = request.heads
    row_cost = q_heads / max(kv_heads, size)  # a team receives a copy of a key for each rank
    works = ASSIGNMENTS[request.assignment](mask.slices, q_layout, k_layout, size, row_cost)
    return [request.plan_of(work, size) for work in works]


def _on_grids(request: PlanRequest, size: int) -> list[PlanValue]:
    """Plans on grids of teams of one size, as they are and evened out, the fewest blocks first.
    Rows leave less memory for keys, perhaps too little."""
    mask, q_layout, k_layout = request.mask, request.q_layout, request.k_layout
    plans = []
    for blocks in numbers_of_blocks(q_layout.group_size // size):
        work = tiled(mask.slices, q_layout, k_layout, size, blocks)
        works = [] if work is None else _distinct([work, evened(work, q_layout, size)])
        plans += [request.plan_of(each, size, blocks) for each in works]
    return plans


def _best(plans: list[PlanValue], rates: Rates) -> PlanValue:
    """The best plan, of those that are the fastest within a twentieth (over several hosts, a
    hundredth) and whose busiest link is well hidden behind kernels or hardly busier than the least
    busy one. Of these it has the fewest calls, then even work if there is such a plan, then the
    least busy link. (Two H200s, contiguous shards of a causal mask: one call fewer was worth 0.6 to
    6 % from 8k tokens to 64k, and 1.3 times the bytes cost nothing.)"""
    if len(plans) == 1:
        return plans[0]
    seconds = [rates.seconds(plan) for plan in plans]
    link = [sum(float(each.link.max()) for each in rates.passes(plan)) for plan in plans]
    as_fast = 1.05 if rates.costs.topology is None else 1.01
    fast = [n for n in range(len(plans)) if seconds[n] <= as_fast * min(seconds)]
    least = min(link[n] for n in fast)
    most = min(max(least / FEWER_BYTES, HIDDEN * min(seconds)), BUSIER * least)
    light = [n for n in fast if link[n] <= most]

    def cost(n: int) -> tuple[int, bool, float]:
        return plans[n].calls(rates.heads[1]).max(), not is_even(plans[n].area), link[n]

    return plans[min(light, key=cost)]
