"""One rank's part of a plan: what it sends and receives, and the mask over its buffers.

work + moves of all ranks --rank_plan--> RankPlan(q, stages)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .buffers import over_buffers
from .exchange import RECV, SEND, SEND_OFFSET, TOKEN0, TOKEN1, Exchange, Moves, exchange
from .intervals import Table, joined
from .slices import Slices, areas


@dataclass(frozen=True)
class Stage:
    """Keys to attend at one step.

    Attributes:
        kv: what to receive, or None where the rank's own key and value tensors are read in place.
        own: int64[n, 6] slices over (rows of the rank's own q, keys of this stage).
        guest: the same over (rows of the received q, keys of this stage).
    """

    kv: Exchange | None
    own: Slices
    guest: Slices

    @property
    def area(self) -> int:
        """Pairs attended in this stage."""
        return int(areas(self.own).sum() + areas(self.guest).sum())


@dataclass(frozen=True)
class RankPlan:
    """One rank's part: exchange rows, attend stage by stage, send the guests' results home.

    Attributes:
        shared_rows: whether some row anywhere is computed by more than one team, so that results
            coming home are merged rather than placed.
    """

    rank: int
    q: Exchange
    stages: tuple[Stage, ...]
    shared_rows: bool

    @property
    def area(self) -> int:
        """Pairs this rank computes, each for its share of the heads."""
        return sum(stage.area for stage in self.stages)

    @property
    def calls(self) -> int:
        """Kernel calls in the forward pass."""
        return sum((len(s.own) > 0) + (len(s.guest) > 0) for s in self.stages)


def rank_plan(
    rank: int,
    slices: Slices,
    q_moves: Moves,
    kv_moves: Moves,
    stage_of: Table,
    held: Table,
    n_stages: int,
    *,
    team_size: int,
    gathered: bool,
    shared_rows: bool,
) -> RankPlan:
    """What ``rank`` does.

    Args:
        slices: the work of the rank's team.
        q_moves, kv_moves: rows and keys that move to the rank's team or from the rank, and what it
            holds itself of those.
        stage_of: of each move of keys.
        held: places of the rank's own keys.
        n_stages: of the whole plan; a rank with nothing to do in a stage still has it.
        gathered: the local keys are copied beside the received ones, and there is one stage.
    """
    team = rank // team_size
    here = (q_moves[:, SEND] == rank) & (q_moves[:, RECV] == team)
    own = q_moves[here][:, [TOKEN0, TOKEN1, SEND_OFFSET]]
    own_places = joined(own[np.argsort(own[:, 0], kind="stable")])
    q = exchange(q_moves, rank, team_size, local=False)
    stages = []
    for n in range(n_stages):
        if n == 0 and not gathered:
            kv, key_places = None, held
        else:
            kv = exchange(kv_moves[stage_of == n], rank, team_size, local=gathered)
            key_places = kv.places
        own_slices = over_buffers(slices, own_places, key_places)
        guest_slices = over_buffers(slices, q.places, key_places)
        stages.append(Stage(kv, own_slices, guest_slices))
    return RankPlan(rank, q, tuple(stages), shared_rows)
