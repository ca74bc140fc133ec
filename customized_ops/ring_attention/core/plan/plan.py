"""From (mask, layouts) to what each rank receives and computes.

    mask + q_layout + k_layout --work--> who computes what --make_plan--> Plan
        --plan.rank(r)--> RankPlan --executor--> out, lse

A plan is a pure function of its arguments, in numpy: every rank makes the same one with no
collective and no device sync, and plans are cached by value. A token's key and value cross a link
once, and only where a slice needs them, but for ranges that are rounded; the same holds for a row.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

from ..layout import Layout
from ..mask import AttnMask
from .choose.plan_request import PlanRequest, require_costs
from .choose.search import ASSIGNMENTS, best_plan
from .cost_model import H200, CostModel
from .heads import Sizes, head_counts
from .plan_value import PlanValue
from .report import picture, text
from .simulate import Timeline, simulate

# Plans are cached for as long as somebody holds them, as a batch planned ahead does, and the last
# ones longer: a batch has one or two for all its layers. A plan of many pieces may take megabytes.
_PLANS: WeakValueDictionary[PlanRequest, Plan] = WeakValueDictionary()
_LAST: deque[Plan] = deque(maxlen=64)
# For each mask, the last plan that was made ahead.
AHEAD: WeakValueDictionary[AttnMask, Plan] = WeakValueDictionary()
_LOCK = Lock()
_OF_PARENTS: list[list[Plan]] = []  # see _after_fork
# What a plan has besides what was asked for.
MADE = (
    *("work", "team_size", "steps", "head_groups", "topology", "held_keys", "few_senders"),
    *("blocks", "rounded", "_ranks", "_exchanges", "planning_seconds"),
)
# What a step looks up, among the properties that a plan works out on first use.
LOOKED_UP = "rows_move", "keys_move", "one_call_each", "_tokens"
# And what the executor has worked out for it without a device (``run/call_pairs.py``).
CALLS = "pairs", "only call", "mask class", "moves", "fingerprint"


@dataclass(frozen=True, eq=False)
class Plan(PlanValue):
    """What every rank moves and computes: the class for users. Made by :func:`make_plan`.

    A plan can be pickled, as by the worker of a DataLoader that makes it ahead of time. Where it is
    unpickled it is cached as if it had been made there, so ops that need it find it.

    Attributes:
        request: what it was made for; None for a plan that :func:`make_plan` did not return.
        planning_seconds: how long making it took, where it was made; for a batch planned ahead,
            including its mask, its layout and the rank's own part. This is what a batch of new
            lengths costs.
        made_ahead: whether a batch was planned with it before a call asked for it.
    """

    request: PlanRequest | None = field(default=None, repr=False)
    planning_seconds: float = field(default=0.0, repr=False)
    made_ahead: bool = field(default=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        made = {name: getattr(self, name) for name in MADE}
        made["made"] = {key: value for key, value in self.made.items() if key[0] in CALLS}
        worked_out = {name: getattr(self, name) for name in LOOKED_UP}
        if self.request is None:
            plan = partial(Plan, self.mask, self.q_layout, self.k_layout, **made)
            return plan, (), worked_out
        return _known, (self.request, made), worked_out

    @property
    def costs(self) -> CostModel:
        """The rates it was chosen by; an H200's where :func:`make_plan` did not return it."""
        return self.request.costs if self.request is not None else H200

    def _heads(self, q_heads: int | None, kv_heads: int | None) -> tuple[int, int]:
        """These heads, or those that it was made for where they are None.

        Raises:
            ValueError: no model has such heads.
        """
        made_for = 32 * self.team_size, 8 * self.team_size
        made_for = made_for if self.request is None else self.request.heads
        q, kv = (a if b is None else b for a, b in zip(made_for, (q_heads, kv_heads), strict=True))
        if (q, kv) != made_for and (min(q, kv) < 1 or q % kv):
            raise ValueError(f"query heads must be a multiple of key heads, got {q} and {kv}")
        return q, kv

    def report(
        self,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int = 128,
        v_dim: int | None = None,
        itemsize: int = 2,
        reduce_itemsize: int | None = None,
        planning: bool = False,
    ) -> str:
        """The plan as a table; see :func:`.text.report`.

        Args:
            q_heads, kv_heads: None: those that the plan was made for, or 32 and 8 times its
                ``team_size`` where :func:`make_plan` did not return it.
            planning: add a line that says what making the plan took, as for a batch of new lengths.
        """
        sizes = *self._heads(q_heads, kv_heads), head_dim, v_dim, itemsize
        table = text.report(self, *sizes, self.costs, reduce_itemsize)
        took = text.format_seconds(self.planning_seconds)
        return table + f"\nplanned in {took}, as each batch of new lengths is" * planning

    def __str__(self) -> str:
        """The plan as a table, for bf16; see :meth:`report`."""
        return self.report()

    def draw(
        self,
        path: str,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int = 128,
        v_dim: int | None = None,
        itemsize: int = 2,
    ) -> None:
        """Draw it to a PNG or SVG file; see :func:`.picture.draw`, and :meth:`report` for heads."""
        sizes = *self._heads(q_heads, kv_heads), head_dim, v_dim, itemsize
        picture.draw(self, path, *sizes, self.costs)

    def simulate(
        self,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int = 128,
        v_dim: int | None = None,
        itemsize: int = 2,
        reduce_itemsize: int | None = None,
        batch: int = 1,
        costs: CostModel | None = None,
    ) -> Timeline:
        """When every rank does what in a forward and a backward pass, by default at the rates that
        the plan was chosen by; see :func:`.simulate`, and :meth:`report` for its heads.

        Raises:
            ValueError: ``costs`` are of hosts with another number of ranks.
            TypeError: ``costs`` is not a CostModel.
        """
        sizes = Sizes.of(*self._heads(q_heads, kv_heads), head_dim, v_dim, itemsize)
        if costs is not None:
            require_costs("simulate", costs)
            if costs.topology is not None and costs.topology.size != self.group_size:
                raise ValueError(
                    f"costs are of {costs.topology.size} ranks ({costs.topology}), the plan "
                    f"{self.group_size}"
                )
        return simulate(self, sizes, costs or self.costs, reduce_itemsize, batch)


def make_plan(
    mask: AttnMask,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    assignment: str = "auto",
    stages: int | None = None,
    heads: Sequence[int] = (32, 8),
    head_dim: int = 128,
    v_dim: int | None = None,
    batch: int = 1,
    itemsize: int = 2,
    team_size: int | None = 1,
    head_groups: int | None = None,
    costs: CostModel = H200,
) -> Plan:
    """Plan attention of ``mask`` over ranks that hold q and k, v as the layouts say.

    Args:
        mask: over the whole sequences.
        q_layout, k_layout: which rank holds which tokens; ``k_layout`` is ``q_layout`` if None.
        assignment: who computes what. ``"owner"``: the holder of a row computes it, and keys move;
            ``"balanced"``: as owner, but ranks with too much work give rows away; ``"nearest"``: as
            balanced, but rows move to the keys where that moves fewer bytes; ``"shared"``: the
            holders of rows and of keys each compute some of the pairs between them, until work is
            even; ``"zigzag"``: as if q were laid out zigzag; ``"tiled"``: teams form a grid, so
            that each has rows of few others and keys of few others (Mesh-Attention, Chen et al.,
            arXiv:2512.20968, 2025), in as many blocks as are the fastest, or work is balanced where
            teams cannot be divided or would have too many parts. ``"auto"`` tries all but zigzag,
            and tiled only where the busiest link is busy for longer than kernels. Of those that are
            the fastest by ``costs``, within a twentieth, and whose bytes are hidden or about the
            fewest, it takes the one with the fewest kernel calls, then bytes. Packed documents,
            with one layout for q and k, are planned by construction instead, and never tiled.
        stages: 0 gathers all keys a rank needs and attends them at once; n >= 1 attends the local
            keys first, then the remote ones in n steps by ring distance, while the next step's keys
            arrive (in about n equal steps over hosts, or with a bound on what is held). None
            chooses 1, or 0 where ``costs`` say that it is faster by more than a twentieth: where so
            little is attended that starting another call takes longer than waiting for the keys. In
            short passes over packed documents 0 may take 0.1 ms longer, as passes over other
            documents are then launched alike.
        heads: query and key heads. Their ratio is the cost of moving a row relative to a key, and
            they bound ``team_size``.
        head_dim, v_dim, batch: those of a call; with little to compute, other plans are the
            fastest. ``v_dim`` is ``head_dim`` if None. Attention finds a plan that was made ahead
            only where these equal its own.
        itemsize: bytes per element of q, k and v, for times on links and for what ranks may hold.
            Attention on GPUs uses that of its dtype; on CPUs it uses 2, whatever the dtype.
        team_size: ranks that share out the heads of the same work (Ulysses, Jacobs et al.,
            arXiv:2309.14509, 2023, within a team); divides the number of ranks, and is at most the
            number of query heads. Shares may differ in size, and ranks may share a key head. None
            takes the fastest.
        head_groups: number of groups of key heads in which received keys arrive, so that the first
            is attended, and its gradients go home, while the next arrives; 1 where ranks share out
            heads, and where no keys move. None takes what is the fastest by ``costs``; on one host
            more than one only where that saves 3 % of the time.
        costs: rates to choose by.
    Raises:
        LayoutError: a layout's total is not the mask's length, or the groups differ in size.
        ValueError: heads that are not two integers, unknown ``assignment``, negative ``stages``,
            ``team_size`` does not divide the ranks or is too large, heads that are split are not
            multiples of one another, ``head_groups`` is not 1 to the key heads, or more than 1 with
            heads split, or a head dim, the batch or ``itemsize`` is below 1.
        TypeError: ``costs`` is not a CostModel.
    """
    request = PlanRequest(
        mask,
        q_layout,
        q_layout if k_layout is None else k_layout,
        assignment,
        stages,
        head_counts("make_plan", heads),
        team_size,
        head_groups,
        costs,
        (batch * head_dim, batch * (head_dim if v_dim is None else v_dim)),
        itemsize,
    )
    request.check(ASSIGNMENTS)
    plan = _PLANS.get(request)  # made once for all layers of a batch, by any thread
    if plan is None:
        started = perf_counter()
        best = best_plan(request)
        given = {each.name: getattr(best, each.name) for each in fields(best)}
        plan = Plan(**given, request=request, planning_seconds=perf_counter() - started)
        vars(plan).update(vars(best))  # keep what was worked out
        _keep(request, plan)
    return plan


def expect(plan: Plan, seconds: float = 0.0) -> None:
    """Record that a plan was made ahead, in ``seconds`` with all that belongs to it."""
    object.__setattr__(plan, "planning_seconds", max(seconds, plan.planning_seconds))
    object.__setattr__(plan, "made_ahead", True)
    AHEAD[plan.mask] = plan


def _known(request: PlanRequest, made: dict[str, Any]) -> Plan:
    """A plan that was made elsewhere, cached from now on."""
    plan = _PLANS.get(request)
    if plan is None:
        plan = Plan(request.mask, request.q_layout, request.k_layout, **made, request=request)
        _keep(request, plan)
    expect(plan)
    return plan


def _after_fork() -> None:
    """In a worker of a DataLoader: keep the parent's plans for good, as they may have tables on
    GPUs, which a forked process may not free."""
    global _PLANS, _LOCK
    _OF_PARENTS.append(list(_PLANS.values()))
    _LAST.clear()
    AHEAD.clear()
    _PLANS, _LOCK = WeakValueDictionary(), Lock()


os.register_at_fork(after_in_child=_after_fork)


def _keep(request: PlanRequest, plan: Plan) -> None:
    with _LOCK:
        _PLANS[request] = plan
        _LAST.append(plan)
