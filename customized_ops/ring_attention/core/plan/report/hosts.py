"""What a plan over several hosts moves between them, and what ranks hold of others' keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...mask.intervals import union
from ..exchange import RECV, SEND, TOKEN0, TOKEN1
from ..moves import located
from ..plan_value import PlanValue


@dataclass(frozen=True)
class HostFigures:
    """Keys in the forward pass.

    Attributes:
        tokens_into_host: that cross into the host with the most, as often as they do.
        tokens_into_host_at_least: those of them that differ.
        received_tokens_at_once: that a rank holds at the most: of the step that it attends, of the
            next one, and what it relays for others; 0 where no keys move.
    """

    tokens_into_host: int
    tokens_into_host_at_least: int
    received_tokens_at_once: int


def host_figures(plan: PlanValue) -> HostFigures:
    """The figures of ``plan``; where it has no topology all ranks are on one host."""
    into, least = 0, 0
    if plan.topology is not None:
        host_of = plan.topology.host_of
        across = plan.crossings[0].across[:, 1]
        needed = plan.kv_needed
        every = union(host_of[needed[:, 0] * plan.team_size], needed[:, 1], needed[:, 2])
        distinct = located(every, plan.k_layout.pieces)
        distinct = distinct[host_of[distinct[:, SEND]] != distinct[:, RECV]]
        tokens = distinct[:, TOKEN1] - distinct[:, TOKEN0]
        into = int(np.bincount(host_of, across).max())
        least = int(np.bincount(distinct[:, RECV], tokens, minlength=1).max())
    return HostFigures(max(into, least), least, _received_at_once(plan))


def _received_at_once(plan: PlanValue) -> int:
    steps, most = plan.arrivals, 0
    if steps is None or plan.gathered:
        return int(plan.kv_tokens()[:, 1].max(initial=0))
    units = steps.unit_of[plan.kv_needed[:, 0] * plan.team_size]
    for unit in range(int(steps.unit_of[-1]) + 1):
        moves = located(plan.kv_needed[units == unit], plan.k_layout.pieces)
        parts, step = steps.cut(moves, np.full(len(moves), unit))
        if plan.team_size == 1:
            others = parts[:, RECV] != parts[:, SEND]
            parts, step = parts[others], step[others]
        width = steps.steps + 3
        shape = plan.group_size // plan.team_size, width
        count = np.bincount(
            parts[:, RECV] * width + step,
            parts[:, TOKEN1] - parts[:, TOKEN0],
            minlength=shape[0] * width,
        ).reshape(shape)
        held = count[:, :-2] + count[:, 1:-1]
        if plan.relays:  # of two steps, half of what it needs at the most
            held = held + (count[:, 1:-1] + count[:, 2:] + 1) // 2
        most = max(most, int(held.max(initial=0)))
    return most
