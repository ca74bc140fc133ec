"""One rank's part of a plan: what it sends and receives, and the mask over its buffers.

    assignment + moves of all ranks --rank_plan--> RankPlan(q, stages)

A slice in global token indices becomes one over buffer positions by cutting it where buffers are
cut and shifting it: nothing here depends on what kind of mask it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .assign import COMPUTE, OWNER, OWNER_OFFSET, ROW0, ROW1, Assignment
from .layout import Layout
from .slices import Slices, areas, clip, shift

Table = npt.NDArray[np.int64]

# Columns of the moves of keys: who receives, who sends, global keys, offset at the sender, stage.
RECV, SEND, KEY0, KEY1, SEND_OFFSET, STAGE = range(6)


@dataclass(frozen=True)
class Exchange:
    """Token ranges that one rank sends and receives in one step.

    Attributes:
        send: int64[n, 3]: peer, first local token, count; by peer, then by global position.
        recv: int64[m, 3]: peer, first token in the receive buffer, count; by buffer position,
            which is global position. For each peer both sides list the same ranges in one order.
        tokens: length of the receive buffer. A rank may be its own peer (a local copy).
    """

    send: Table
    recv: Table
    tokens: int

    @property
    def empty(self) -> bool:
        """Nothing to send and nothing to receive."""
        return len(self.send) == 0 and len(self.recv) == 0


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
    """One rank's part: exchange rows to balance, then attend stage by stage."""

    rank: int
    q: Exchange
    stages: tuple[Stage, ...]

    @property
    def area(self) -> int:
        """Pairs this rank computes."""
        return sum(stage.area for stage in self.stages)

    @property
    def calls(self) -> int:
        """Kernel calls in the forward pass."""
        return sum((len(s.own) > 0) + (len(s.guest) > 0) for s in self.stages)


def rank_plan(
    rank: int,
    slices: Slices,
    rows: Assignment,
    kv_moves: Table,
    k_layout: Layout,
    n_stages: int,
    *,
    gathered: bool,
) -> RankPlan:
    """What ``rank`` does.

    Args:
        slices: the mask. rows: who computes which row. kv_moves: keys that cross to another rank,
            with their stage. k_layout: where keys lie.
        n_stages: of the whole plan; a rank with nothing to do in a stage still has it.
        gathered: the local keys are copied beside the received ones, and there is one stage.
    """
    given = rows[rows[:, COMPUTE] != rows[:, OWNER]]
    q, guest_places = _exchange(given[:, [COMPUTE, OWNER, ROW0, ROW1, OWNER_OFFSET]], rank)
    kept = rows[(rows[:, COMPUTE] == rank) & (rows[:, OWNER] == rank)]
    own_places = kept[:, [ROW0, ROW1, OWNER_OFFSET]]
    stages = []
    for n in range(n_stages):
        if n == 0 and not gathered:
            held = k_layout.pieces
            kv, key_places = None, held[held[:, 0] == rank][:, 1:]
        else:
            moves = kv_moves[kv_moves[:, STAGE] == n]
            kv, key_places = _exchange(moves[:, :STAGE], rank)
        own = _local_slices(slices, own_places, key_places)
        guest = _local_slices(slices, guest_places, key_places)
        stages.append(Stage(kv, own, guest))
    return RankPlan(rank, q, tuple(stages))


def _exchange(moves: Table, rank: int) -> tuple[Exchange, Table]:
    """``rank``'s side of ``moves`` (receiver, sender, global start, end, offset at the sender).

    Also returns where received tokens lie: int64[m, 3] global start, end, buffer offset, with
    ranges that touch both globally and in the buffer joined.
    """
    out = moves[moves[:, 1] == rank]
    out = out[np.lexsort((out[:, 2], out[:, 0]))]
    into = moves[moves[:, 0] == rank]
    into = into[np.argsort(into[:, 2], kind="stable")]
    size = into[:, 3] - into[:, 2]
    offset = np.cumsum(size) - size
    exchange = Exchange(
        send=np.stack([out[:, 0], out[:, 4], out[:, 3] - out[:, 2]], axis=1),
        recv=np.stack([into[:, 1], offset, size], axis=1),
        tokens=int(size.sum()),
    )
    return exchange, _join(np.stack([into[:, 2], into[:, 3], offset], axis=1))


def _join(places: Table) -> Table:
    """Join rows (start, end, offset) that continue one another; sorted by start and by offset."""
    if len(places) == 0:
        return places
    first = np.ones(len(places), dtype=bool)
    first[1:] = places[1:, 0] != places[:-1, 1]
    heads = np.flatnonzero(first)
    lasts = np.append(heads[1:], len(places)) - 1
    return np.stack([places[heads, 0], places[lasts, 1], places[heads, 2]], axis=1)


def _local_slices(slices: Slices, row_places: Table, key_places: Table) -> Slices:
    """The mask over buffers: cut by places (start, end, offset) and renumbered to offsets."""
    parts = [
        shift(clip(slices, row0, row1, key0, key1), row_at - row0, key_at - key0)
        for row0, row1, row_at in row_places.tolist()
        for key0, key1, key_at in key_places.tolist()
    ]
    found = [part for part in parts if len(part)]
    return np.concatenate(found) if found else np.zeros((0, 6), dtype=np.int64)
