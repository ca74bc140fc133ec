"""Which variant of a plan is the fastest, by the times that a cost model predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...arrays import Floats, Ints
from ..cost_model import CostModel, Pass
from ..heads import Sizes
from ..plan_value import PlanValue
from ..simulate import simulate
from .head_groups import COUNTS, best_head_groups
from .plan_request import PlanRequest

# Plans that differ by less than a twentieth are as fast as each other.
AS_FAST = 0.95
# From how many hosts a host has keys where their messages may be too many: about as many as the
# ranks of a host of eight have for one another.
MANY = 8
# Up to how many ranks of several hosts plans are simulated before one is chosen; how many plans.
SIMULATED_RANKS, SIMULATED_PLANS = 32, 4


def _least_of(plans: list[PlanValue], seconds: Callable[[PlanValue], float]) -> list[PlanValue]:
    """Those that take the least time, or up to 1% more."""
    least = min(map(seconds, plans))
    return [plan for plan in plans if seconds(plan) <= 1.01 * least]


def _fits(plan: PlanValue, groups: int) -> bool:
    """Whether a rank may receive all keys of a group of heads at once."""
    most = plan.step_keys * groups
    return most == 0 or int(plan.kv_tokens()[:, 1].max(initial=0)) <= most


def is_even(area: Ints | Floats) -> bool:
    """Whether the largest of these areas, of ranks or of teams, is about the mean."""
    return bool(area.max(initial=0) * AS_FAST <= area.mean())


@dataclass(frozen=True)
class Rates:
    """The predicted times by which plans are compared, for heads of these ``sizes``."""

    costs: CostModel
    sizes: Sizes
    _passes: dict[PlanValue, tuple[Pass, Pass]] = field(default_factory=dict)
    _simulated: dict[PlanValue, float] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key heads."""
        return self.sizes.q_heads, self.sizes.kv_heads

    def team_sizes(self, ranks: int) -> Iterator[int]:
        """How many ranks, all of one host, may share out the heads of the same work."""
        q_heads, kv_heads = self.heads
        # A team shares out whole groups of heads; q cut on its heads alone has none.
        most = min(ranks, q_heads) if kv_heads and q_heads % kv_heads == 0 else 1
        hosts = self.costs.topology.hosts if self.costs.topology is not None else (ranks,)
        together = math.gcd(*hosts)
        return (n for n in range(1, max(most, 1) + 1) if together % n == 0)

    def passes(self, plan: PlanValue) -> tuple[Pass, Pass]:
        """Forward and backward pass, counted once for each plan."""
        if plan not in self._passes:
            self._passes[plan] = self.costs.passes(plan, *self.sizes)
        return self._passes[plan]

    def seconds(self, plan: PlanValue) -> float:
        """Time of a forward and a backward pass."""
        return sum(each.seconds for each in self.passes(plan))

    def simulated_seconds(self, plan: PlanValue) -> float:
        """The same in a simulation, made once for each plan."""
        if plan not in self._simulated:
            self._simulated[plan] = simulate(plan, self.sizes, self.costs).seconds
        return self._simulated[plan]

    def is_fast(self, *plans: PlanValue) -> bool:
        """Whether one of these plans, all for one mask, is as fast as evenly loaded kernels alone,
        started in one call; then no plan can be faster."""
        call = self.costs.call_seconds
        least = sum(max(float(each.compute.mean()), call) for each in self.passes(plans[0]))
        return least >= AS_FAST * min(self.seconds(plan) for plan in plans)

    def kernel_seconds(self, pairs: float, calls: int) -> float:
        """Time of a forward and a backward of kernels alone, each started in so many calls."""
        start = calls * self.costs.call_seconds
        return sum(max(each, start) for each in self.attend_seconds(pairs))

    def attend_seconds(self, pairs: float) -> tuple[float, float]:
        """Time of kernels over ``pairs`` pairs of all heads, forward and backward."""
        sizes = self.sizes
        times = self.costs.attend_seconds(pairs, sizes.q_heads, sizes.head_dim, sizes.v_dim)
        return float(times[0]), float(times[1])

    def kernels_are_busy(self, plan: PlanValue) -> bool:
        """Whether neither a link nor a host is busy for longer than ranks attend."""
        return all(
            not each.host_bound and float(each.link.max()) <= each.attend_seconds
            for each in self.passes(plan)
        )

    def arranged(self, plan: PlanValue, request: PlanRequest) -> PlanValue:
        """``plan`` with keys that arrive in the steps and groups of heads that are asked for, or
        best."""
        plan = self._from_few(self.in_head_groups(self.staged(plan, request), request))
        if not plan.few_senders:
            return plan
        arrivals = plan.arrivals
        cut = arrivals is not None and arrivals.steps > 1 and len(arrivals.slices) == 1
        return plan if cut else plan.variant(few_senders=False)

    def staged(self, plan: PlanValue, request: PlanRequest) -> PlanValue:
        """``plan`` in as few steps as memory and hosts let it have, where the request leaves that
        open."""
        if request.head_groups is None:
            plan = self._in_fewer_steps(plan)
        if request.stages is not None:
            return plan
        return self._staged_or_gathered(self._in_more_steps(plan))

    def _in_fewer_steps(self, plan: PlanValue) -> PlanValue:
        """``plan``, or where a rank may hold too few keys for one step, the same in as many groups
        of heads as are the fastest. With fewer heads, as many bytes hold more keys, so there are
        fewer steps, and results are merged less often."""
        if plan.team_size > 1 or plan.head_groups > 1 or plan.gathered or _fits(plan, 1):
            return plan
        counts = self._even_groups()
        # Of counts that are as fast, take the most groups: the first keys arrive the soonest.
        plans = [plan.variant(head_groups=count) for count in reversed(counts)]
        plans = [self._from_few(each) for each in plans]
        fast = _least_of(plans, self.seconds)
        return _least_of(fast, lambda plan: sum(p.attend_seconds for p in self.passes(plan)))[0]

    def _in_more_steps(self, plan: PlanValue) -> PlanValue:
        """``plan``, or where its keys take several steps, the same in two or four times as many if
        that is faster: the first keys arrive sooner, and each step is a call and a batch more. Not
        for several documents, as ranks then have more to do in some steps than in others, and wait
        for one another in each."""
        steps = plan.steps_with_keys
        if plan.gathered or plan.topology is None or _fits(plan, plan.head_groups):
            return plan
        if not plan.all_meet:
            return plan
        more = (plan.variant(steps=n * steps) for n in (2, 4))
        return _least_of([plan, *more], self.seconds)[0]

    def _staged_or_gathered(self, plan: PlanValue) -> PlanValue:
        """``plan``, or the same without stages where that is faster."""
        if not any(each.host_bound for each in self.passes(plan)):
            return plan  # gathering only saves calls
        if plan.gathered or not plan.keys_move or plan.steps_with_keys > 1:
            return plan  # gathering takes memory
        gathered = plan.variant(steps=0)
        return gathered if self.seconds(gathered) < AS_FAST * self.seconds(plan) else plan

    def _from_few(self, plan: PlanValue) -> PlanValue:
        """``plan``, or the same with few senders in each step, where the messages of many would
        keep hosts busier than kernels, and half as busy again as links. Whether they can be few,
        which takes longer to find out, is left open."""
        passes = self.passes(plan)
        link = sum(float(each.link.max()) for each in passes)
        launch = sum(float(each.launch.max()) for each in passes)
        if 1.5 * link > launch or not any(each.host_bound for each in passes):
            return plan
        if plan.few_senders or plan.steps_with_keys <= 1 or plan.met.max() < MANY:
            return plan
        few = plan.variant(few_senders=True)
        return few if self.seconds(few) < self.seconds(plan) else plan

    def in_head_groups(self, plan: PlanValue, request: PlanRequest) -> PlanValue:
        """``plan``, with keys that arrive in as many groups of heads as are asked for, or best."""
        if plan.team_size > 1 or not plan.keys_move or plan.head_groups > 1:
            return plan
        if (count := request.head_groups) is not None:
            return plan if count == 1 else plan.variant(head_groups=count)
        if plan.arrivals is not None and plan.n_stages > 2:
            return plan  # while keys of one step are attended, those of the next arrive
        if plan.topology is not None:  # the passes count what groups hide
            plans = [plan.variant(head_groups=count) for count in self._even_groups()]
            return _least_of(plans, self.seconds)[0]
        count = best_head_groups(plan, self.passes(plan), self.costs, self.sizes)
        grouped = plan if count == 1 else plan.variant(head_groups=count)
        # On one host the passes count each call of the groups, but not what groups hide.
        return plan if self.seconds(grouped) > self.seconds(plan) else grouped

    def like(self, plan: PlanValue, request: PlanRequest) -> list[PlanValue]:
        """``plan``, and the same work with keys in other groups of heads, or not gathered, where
        the request leaves that open."""
        if plan.team_size > 1 or not plan.keys_move:
            return [plan]
        counts = self._even_groups() if request.head_groups is None else [plan.head_groups]
        found = [plan.variant(head_groups=count) for count in counts]
        if plan.gathered and request.stages is None:
            staged = [each.variant(steps=1) for each in found]
            found = [*staged, *(each for each in found if _fits(each, each.head_groups))]
        now = plan.steps, plan.head_groups
        return [plan, *(each for each in found if (each.steps, each.head_groups) != now)]

    def _even_groups(self) -> list[int]:
        """Counts of groups with equal numbers of key heads, and so equal parts of the bytes."""
        kv_heads = max(self.heads[1], 1)
        return [count for count in COUNTS if kv_heads % count == 0]

    def ask_simulator(self, ranks: int) -> bool:
        """Whether plans are compared by simulating them: over several hosts ranks wait for one
        another, which the cost model knows nothing about."""
        return self.costs.topology is not None and ranks <= SIMULATED_RANKS

    def fastest(self, plans: list[PlanValue]) -> PlanValue:
        """The plan that is the fastest in a simulation, of the few that the cost model ranks
        highest; of those that are as fast, the first."""
        likely = sorted(plans, key=self.seconds)[:SIMULATED_PLANS]
        likely = [plan for plan in plans if plan in likely]
        if len(likely) == 1:
            return likely[0]
        return _least_of(likely, self.simulated_seconds)[0]
