"""The exchanges of a rank's keys, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from ...arrays import Ints
from ...layout import Layout
from .. import moves
from ..arrivals import Arrivals
from ..moves import STEP, Moves
from .exchange import Exchange
from .of_moves import exchanges
from .relays import relayed


def by_distance(some: Moves, layout: Layout, team_size: int, steps: int, *, local: bool) -> Moves:
    """Moves of keys, to arrive in ``steps`` steps by ring distance; with ``local`` all arrive at
    once."""
    if local:
        return some
    some[:, STEP] = moves.ring_stage(some, layout.group_size, steps, team_size) - 1
    return some[some[:, STEP] >= 0]


def key_exchanges(
    needed: Ints,
    layout: Layout,
    rank: int,
    team_size: int,
    steps: Arrivals | int,
    relays: bool,
    *,
    local: bool,
) -> Iterator[Exchange]:
    """What ``rank`` sends and receives in each step.

    Args:
        needed: int64[n, 3]: team, start, stop of the keys that it attends; disjoint within a team.
        steps: which keys arrive when; a number means that many steps by ring distance.
        relays: whether keys cross to each unit of ``steps`` once.
        local: whether what the rank holds itself is received too, as a copy, in one step with all
            others.
    """
    if not isinstance(steps, Arrivals):
        own = needed[:, 0] == rank // team_size
        some = moves.of_rank(needed, own, layout, rank)
        some = by_distance(some, layout, team_size, steps, local=local)
        yield from exchanges(some, steps, rank, team_size, local=local)
        return
    own = steps.unit_of[needed[:, 0] * team_size] == steps.unit_of[rank]
    some = moves.of_rank(needed, own, layout, rank)
    some = steps.cut(some, team_size)
    # A rank with nothing to do in a step still has it.
    if relays:
        yield from relayed(some, steps.steps, rank, steps.unit_of, local=local)
    else:
        yield from exchanges(some, steps.steps, rank, team_size, local=local)
