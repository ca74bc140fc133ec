"""One rank's part of a plan: what it sends and receives, and the mask over its buffers.

work + moves of all ranks --rank_plan--> RankPlan(q, stages)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .buffers import over_buffers
from .intervals import Table, joined, spread
from .slices import Slices, areas

# Columns of moves: the team that receives, the rank that sends, global tokens, offset of the first
# at the sender, stage. Every rank of a team receives its share of the heads of these tokens.
RECV, SEND, TOKEN0, TOKEN1, SEND_OFFSET, STAGE = range(6)


@dataclass(frozen=True)
class Exchange:
    """Token ranges that one rank sends and receives in one step.

    Attributes:
        send: int64[n, 3]: peer, first local token, count; by peer, then by receive position.
        recv: int64[m, 3]: peer, first token in the receive buffer, count; by buffer position. For
            each peer both sides list the same ranges in one order.
        places: int64[t, 3]: which tokens the buffer holds (global start, stop, offset), by start.
        tokens: length of the receive buffer. A rank may be its own peer (a local copy).
        team_size: a peer is sent, and this rank receives, one of ``team_size`` shares of the
            heads: peer p computes share p % team_size.
    """

    send: Table
    recv: Table
    places: Table
    tokens: int
    team_size: int = 1

    @property
    def empty(self) -> bool:
        """Nothing to send and nothing to receive."""
        return len(self.send) == 0 and len(self.recv) == 0

    @cached_property
    def indices(self) -> Table:
        """int64[tokens]: the global token at each buffer position."""
        return token_indices(self.places, self.tokens)


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
    q_moves: Table,
    kv_moves: Table,
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
        q_moves, kv_moves: rows and keys that teams need, from every rank that holds some, its own
            included.
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
            kv = exchange(kv_moves[kv_moves[:, STAGE] == n], rank, team_size, local=gathered)
            key_places = kv.places
        own_slices = over_buffers(slices, own_places, key_places)
        guest_slices = over_buffers(slices, q.places, key_places)
        stages.append(Stage(kv, own_slices, guest_slices))
    return RankPlan(rank, q, tuple(stages), shared_rows)


def exchange(moves: Table, rank: int, team_size: int, *, local: bool) -> Exchange:
    """``rank``'s side of ``moves``, received in global order.

    Args:
        local: whether what the rank holds itself is received too, as a copy.
    """
    into = moves[moves[:, RECV] == rank // team_size]
    into = into[local | (into[:, SEND] != rank)]
    into = into[np.argsort(into[:, TOKEN0], kind="stable")]
    size = into[:, TOKEN1] - into[:, TOKEN0]
    offset = np.cumsum(size) - size
    out = moves[moves[:, SEND] == rank]
    peers = (out[:, [RECV]] * team_size + np.arange(team_size)).reshape(-1)
    out = np.repeat(out, team_size, axis=0)
    going = local | (peers != rank)
    peers, out = peers[going], out[going]
    order = np.lexsort((out[:, TOKEN0], peers))
    peers, out = peers[order], out[order]
    return Exchange(
        send=np.stack([peers, out[:, SEND_OFFSET], out[:, TOKEN1] - out[:, TOKEN0]], axis=1),
        recv=np.stack([into[:, SEND], offset, size], axis=1),
        places=joined(np.stack([into[:, TOKEN0], into[:, TOKEN1], offset], axis=1)),
        tokens=int(size.sum()),
        team_size=team_size,
    )


def token_indices(places: Table | Sequence[Sequence[int]], tokens: int) -> Table:
    """int64[tokens]: the global token at each position of a buffer with these places."""
    table = np.asarray(places, dtype=np.int64).reshape(-1, 3)
    indices = np.zeros(tokens, dtype=np.int64)
    x, token = spread(table[:, 0], table[:, 1])
    indices[table[x, 2] + token - table[x, 0]] = token
    return indices
