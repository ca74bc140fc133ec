"""What every rank sends and attends in each step, counted for all ranks together.

The exchanges of one rank list the tokens that move; for 512 ranks and as many steps these lists
would be too much to make. Here there are only counts, made for one unit of ranks (a host, or a
team) after the other. They equal those of the exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...arrays import Floats, Ints
from ...mask.slices import Q0, Q1, areas, cut_keys
from ..assign.work import TEAM
from ..exchanges.relays import relay_parts
from ..moves import RECV, SEND, STEP, TOKEN0, TOKEN1, Moves, located, ring_stage, to_each
from ..over_buffers import over_rows
from ..plan_value import PlanValue

OWN, REMOTE = 0, 1  # whose rows are attended: the rank's own, or received ones


class Sent(NamedTuple):
    """Messages of one exchange: int64[m] ranks, float64[m] bytes."""

    sender: Ints
    receiver: Ints
    nbytes: Floats


class Messages(NamedTuple):
    """Tokens that holders send to where they are attended or relayed, in one exchange: int64[m]
    each, and each pair of ranks once."""

    holder: Ints
    reader: Ints
    tokens: Ints

    def out(self, token_bytes: Ints | Floats) -> Sent:
        """What is sent out, with ``token_bytes``, number[P], of a token as each rank reads it."""
        return Sent(self.holder, self.reader, 1.0 * self.tokens * token_bytes[self.reader])

    def back(self, token_bytes: Ints | Floats) -> Sent:
        """What is made of these tokens, on its way back."""
        return Sent(self.reader, self.holder, 1.0 * self.tokens * token_bytes[self.reader])


NO_MESSAGES = Messages(*np.zeros((3, 0), dtype=np.int64))


class KeyStep(NamedTuple):
    """The keys of one stage: straight to the ranks that attend them, or across to a rank that
    relays them, and from there to all ranks of its host that attend them
    (:mod:`..exchanges.relays`)."""

    straight: Messages
    cross: Messages = NO_MESSAGES
    spread: Messages = NO_MESSAGES


@dataclass(frozen=True)
class Counts:
    """A plan in numbers of tokens and pairs.

    Attributes:
        rows: those that are computed by a rank other than their holder.
        keys: those of each stage; None where ranks read their own in place.
        pairs: int64[stages, 2, P]: that each rank attends, of its own rows and of received ones.
        hulls: int64[stages, 2, P]: how many rows a kernel is given for them, from the first that
            attends something to the last.
    """

    rows: Messages
    keys: tuple[KeyStep | None, ...]
    pairs: Ints
    hulls: Ints


def counts(plan: PlanValue) -> Counts:
    """The counts of all ranks of ``plan``."""
    stages, ranks, size = plan.n_stages, plan.group_size, plan.team_size
    attended = np.zeros((2, stages, 2, ranks), dtype=np.int64)
    q = list(plan.row_exchanges())
    found: list[list[Ints]] = [[] for _ in KeyStep._fields]
    unit_of_team = np.arange(ranks // size)
    if plan.arrivals is not None:
        unit_of_team = plan.arrivals.unit_of[::size]
    for unit in range(int(unit_of_team[-1]) + 1):
        moves = arriving(plan, unit_of_team, unit)
        for tables, moved in zip(found, ways(plan, moves), strict=True):
            tables.append(_by_pair(moved, size, ranks))
        for team in np.flatnonzero(unit_of_team == unit).tolist():
            mine = moves[moves[:, RECV] == team]
            for rank in range(team * size, (team + 1) * size):
                places = plan.q_layout.places(rank), q[rank].places
                _attended(plan, rank, mine, places, attended[..., rank])
    by_way = [_by_stage(np.concatenate(tables), stages, ranks) for tables in found]
    keys = [KeyStep(*each) for each in zip(*by_way, strict=True)]
    of_stages = keys if plan.gathered else [None, *keys[1:]]
    received = [(n, r, each.count) for r in range(ranks) for n, each in q[r].received.items()]
    rows = Messages(*np.array(received, dtype=np.int64).reshape(-1, 3).T)
    return Counts(rows, tuple(of_stages), *attended)


def arriving(plan: PlanValue, unit_of_team: Ints, unit: int) -> Moves:
    """The keys that the teams of a unit need, by holder; their step is the stage in which they
    arrive. A rank's own are among them."""
    needed = plan.kv_needed[unit_of_team[plan.kv_needed[:, 0]] == unit]
    moves = located(needed, plan.k_layout.pieces)
    if plan.arrivals is not None:
        moves = plan.arrivals.cut(moves, plan.team_size)
        moves[:, STEP] += 1  # keys that are read in place come first
    else:
        steps = max(plan.steps, 1)
        moves[:, STEP] = ring_stage(moves, plan.group_size, steps, plan.team_size)
    if plan.gathered:
        moves[:, STEP] = 0
    return moves


def ways(plan: PlanValue, moves: Moves) -> tuple[Moves, Moves, Moves]:
    """``moves`` into one unit in the three ways of :class:`KeyStep`."""
    if not plan.relays:
        return moves, moves[:0], moves[:0]
    assert plan.topology is not None
    others = moves[moves[:, RECV] != moves[:, SEND]]
    own_first = 0 if plan.gathered else 1
    others[:, STEP] -= own_first
    three = relay_parts(others, plan.topology.host_of, plan.n_stages - own_first)
    for each in three:
        each[:, STEP] += own_first
    return three


def _by_pair(moves: Moves, team_size: int, ranks: int) -> Ints:
    """int64[m, 2]: (stage * ranks + sender) * ranks + receiver, and the tokens that are sent,
    sorted by the former; what a rank has itself is not sent."""
    moves, receiver = to_each(moves, team_size, local=False)
    key = (moves[:, STEP] * ranks + moves[:, SEND]) * ranks + receiver
    order = key.argsort()
    key, tokens = key[order], (moves[:, TOKEN1] - moves[:, TOKEN0])[order]
    heads = np.flatnonzero(np.diff(key, prepend=-1))
    return np.array([key[heads], np.add.reduceat(tokens, heads) if len(heads) else key]).T


def _by_stage(table: Ints, stages: int, ranks: int) -> list[Messages]:
    """The messages of each stage, from what :func:`_by_pair` found."""
    key, tokens = table[table[:, 0].argsort()].T
    ends = key.searchsorted(np.arange(1, stages) * ranks**2)
    each = (np.split(column, ends) for column in (key // ranks % ranks, key % ranks, tokens))
    return [Messages(*three) for three in zip(*each, strict=True)]


def _attended(
    plan: PlanValue, rank: int, moves: Moves, places: tuple[Ints, Ints], into: Ints
) -> None:
    """Add to ``into``, int64[2, stages, 2], the pairs and the hulls of one rank.

    Args:
        moves: all keys of its team, with their stages.
        places: those of the rows that it holds, and of the rows that it receives.
    """
    work = plan.work[plan.work[:, TEAM] == rank // plan.team_size, :TEAM]
    stage = np.where(moves[:, SEND] == rank, 0, moves[:, STEP])
    pairs, hulls = into
    for whose in (OWN, REMOTE):
        _, key, parts = cut_keys(over_rows(work, places[whose]), moves[:, [TOKEN0, TOKEN1]])
        first = np.full(len(pairs), np.iinfo(np.int64).max)
        last = np.zeros(len(pairs), dtype=np.int64)
        np.minimum.at(first, stage[key], parts[:, Q0])
        np.maximum.at(last, stage[key], parts[:, Q1])
        np.add.at(pairs[:, whose], stage[key], areas(parts))
        hulls[:, whose] = np.maximum(last - first, 0)
