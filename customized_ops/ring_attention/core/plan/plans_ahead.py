"""Plans that were made ahead of the step that needs them, and warnings where they were not."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from dataclasses import fields
from operator import attrgetter
from time import perf_counter
from typing import Any

from ..layout import Layout
from ..mask import AttnMask
from .choose.plan_request import PlanRequest
from .cost_model import CostModel
from .plan import AHEAD, Plan

# What a plan is asked for besides its mask and layouts.
_OF_TOKENS = "mask", "q_layout", "k_layout"
_BUT_TOKENS = attrgetter(*(f.name for f in fields(PlanRequest) if f.name not in _OF_TOKENS))
# How many of the last plans are looked at, more than a model needs for one batch; and the seconds
# that they must span at least, those of several batches.
LAST_PLANS = 50
LEAST_SECONDS = 1.0
LARGEST_SHARE = 1 / 20


def plan_made_ahead(like: Plan, mask: AttnMask, layout: Layout, costs: CostModel) -> Plan | None:
    """The plan that was made ahead for a call that differs from that of ``like`` in this alone."""
    plan = AHEAD.get(mask)
    if plan is None or plan.request is None or like.request is None:
        return None
    same = _BUT_TOKENS(plan.request) == _BUT_TOKENS(like.request) and plan.request.costs == costs
    return plan if same and plan.q_layout == layout == plan.k_layout else None


def check_expected(plan: Plan) -> None:
    """Warn where the plan of a call had to be made, though one for its mask was made ahead."""
    ahead = None if plan.made_ahead else AHEAD.get(plan.mask)
    if ahead is None or ahead.request is None or plan.request is None:
        return
    made, asked = ahead.request, plan.request
    names = [f.name for f in fields(made) if getattr(made, f.name) != getattr(asked, f.name)]
    if not names:  # two threads made the same plan
        return
    shown = [name for name in names if not name.endswith("layout")]  # they differ with each batch
    there = ["another layout"] if len(shown) < len(names) else []
    pairs: list[tuple[Any, Any, str]] = [(made, asked, name) for name in shown if name != "costs"]
    rates = [(made.costs, asked.costs, f.name) for f in fields(CostModel)]
    pairs += [(a, b, name) for a, b, name in rates if getattr(a, name) != getattr(b, name)]
    there += [f"{name}={getattr(a, name)}" for a, _, name in pairs]
    here = [f"{name}={getattr(b, name)}" for _, b, name in pairs]
    warnings.warn(
        "attention plans again in the step: the plan of this batch was made ahead for "
        f"{', '.join(there)}, and the call is of {', '.join(here) or 'its own'}; give "
        "packed_batches, or PackDocuments, the model's heads, head_dim and itemsize, "
        "costs=group_costs(process_group), and the layout that the call has: for a module of "
        "parallelize layout=module.plan.packed_layout",
        stacklevel=2,
    )


class PlanningShare:
    """Warns once if the last plans took more than LARGEST_SHARE of the time they were made in. This
    is time before the first kernel, which :func:`~....packed_batches.packed_batches` would hide."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, float]] = deque(maxlen=LAST_PLANS)  # when, and seconds
        self._warned = False

    def add(self, seconds: float) -> None:
        """Record that a call has waited ``seconds`` for its plan, until now."""
        # Ranks that are threads share one core's Python, so their waiting times say nothing.
        if self._warned or threading.current_thread() is not threading.main_thread():
            return
        self._made.append((perf_counter(), seconds))
        if len(self._made) < LAST_PLANS:
            return
        elapsed = self._made[-1][0] - self._made[0][0]
        planning = sum(seconds for _, seconds in self._made) - self._made[0][1]
        if elapsed > LEAST_SECONDS and planning > LARGEST_SHARE * elapsed:
            self._warned = True
            warnings.warn(
                f"planning attention for new lengths took {planning / elapsed:.0%} of the last "
                f"{elapsed:.3g} s; make plans ahead of time with packed_batches, or let a "
                "DataLoader's workers do it with PackDocuments (customized_ops.ring_attention)",
                stacklevel=2,
            )
