"""Who computes what in a plan, and in which stages and kernel calls: its tables, and what follows
from these for all ranks together. What moves is in :mod:`.plan_value`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Bools, Ints
from ..layout import Layout
from ..mask import AttnMask
from ..mask.intervals import union
from ..mask.slices import K0, K1, Q0, Q1
from ..topology import Topology
from . import moves
from .arrivals import LEFT_OVER, Arrivals, Bound, arrivals
from .assign.work import TEAM, Work, area_per_team
from .exchanges.held import relayed_part
from .heads import heads_of_ranks


def batches(exchanges: Any, relays: Any, rows: Any) -> tuple[Any, Any]:
    """Batches of messages in a forward, and in a backward, where gradients of keys go home, too.

    Args:
        exchanges: in how many exchanges keys come; a number, or an array, as the others.
        relays: whether keys go on inside the host: together with the next ones that cross, so the
            last ones are one batch more.
        rows: whether rows move; they come, and their results go home.
    """
    return exchanges + relays + 2 * rows, 2 * (exchanges + relays) + 2 * rows


@dataclass(frozen=True, eq=False)
class PlannedWork:
    """What every rank computes.

    Attributes:
        work: int64[n, 7]: the mask's slices, cut, and the team that computes each.
        team_size: ranks that share out the heads of the same work; 1 where heads are not split.
            Team t is the team_size ranks from t * team_size on; the n-th rank of a team has the
            n-th share (:func:`.heads.head_shares`).
        steps: 0 where all keys that a rank needs, its own included, are gathered and attended at
            once; else the number of steps in which they arrive, unless :attr:`arrivals` gives it.
        head_groups: number of groups of key heads in which received keys arrive
            (:mod:`.head_groups`); with fewer key heads, each is a group.
        topology: hosts of the ranks; None: all links are alike.
        held_keys: how many keys of others, of all heads, a rank may hold at once; with n groups of
            heads, n times as many; 0: any number.
        few_senders: whether keys come from few ranks in each step (:mod:`.arrivals`).
        blocks: of teams on a grid (:mod:`.assign.tiled_work`); 1: there is none.
        rounded: whether ranks gather more keys than they attend (:func:`.moves.rounded`).
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    work: Work
    team_size: int
    steps: int
    head_groups: int = 1
    topology: Topology | None = None
    held_keys: int = 0
    few_senders: bool = False
    blocks: int = 1
    rounded: bool = False

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return self.q_layout.group_size

    @cached_property
    def q_needed(self) -> Ints:
        """int64[n, 3]: rows of which each team computes some pairs: team, start, stop."""
        return union(self.work[:, TEAM], self.work[:, Q0], self.work[:, Q1])

    @cached_property
    def kv_needed(self) -> Ints:
        """int64[n, 3]: keys that each team attends, and some more where they are :attr:`rounded`:
        team, start, stop."""
        needed = union(self.work[:, TEAM], self.work[:, K0], self.work[:, K1])
        return moves.rounded(needed, self.k_layout) if self.rounded else needed

    @cached_property
    def rows_move(self) -> bool:
        """Whether a rank computes rows of another."""
        return bool(self.kinds_of_calls[1].any())

    @cached_property
    def keys_move(self) -> bool:
        """Whether a rank attends keys of another."""
        return bool(self.kv_tokens().any())

    @cached_property
    def gathered(self) -> bool:
        """Whether keys are gathered first; where none move they are read in place."""
        return self.steps == 0 and self.keys_move

    @cached_property
    def n_stages(self) -> int:
        """Stages that each rank runs; all ranks run the same number, empty ones included."""
        if self.gathered or not self.keys_move:
            return 1
        return 1 + (self.steps if self.arrivals is None else self.arrivals.steps)

    @cached_property
    def relays(self) -> bool:
        """Whether keys that several ranks of a host need cross to that host only once."""
        return self.topology is not None and self.topology.relays and self.team_size == 1

    @property
    def few_at_once(self) -> bool:
        """Whether a rank holds few keys of others, and waits until their gradients are home, except
        those of the last two exchanges."""
        return self.held_keys > 0 or self.arrivals is not None

    @cached_property
    def relayed_part(self) -> float:
        """See :func:`.exchanges.held.relayed_part`; 0 where nothing is relayed or bounded."""
        if self.topology is None or not self.relays or self.held_keys == 0:
            return 0.0
        received = self.kv_tokens()[:, 1]
        return relayed_part(self.kv_needed, self.k_layout, self.topology.host_of, received)

    @cached_property
    def step_keys(self) -> int:
        """How many keys, of all heads, a rank may receive in one step; with n groups of heads, n
        times as many; 0: any number. Held at once are those of a step, both as they arrived and put
        together, and then those of the next as they arrive; and what is relayed."""
        if self.held_keys == 0:
            return 0
        least = max(self.held_keys // (3 if self.relays else 2), 1)
        if not self.relays or int(self.kv_tokens()[:, 1].max(initial=0)) <= least:
            return least
        return max(int(self.held_keys / (2 + self.relayed_part)), 1)

    @cached_property
    def arrivals(self) -> Arrivals | None:
        """Steps by hosts, or steps in which ranks hold few keys; None: :attr:`steps` steps by ring
        distance."""
        all_received, room = self.kv_tokens()[:, 1], self.step_keys * self.head_groups
        too_many = 0 < room < all_received.max(initial=0)
        if not (self.relays or too_many):
            return None
        units = np.arange(self.group_size) // self.team_size
        if self.relays:
            assert self.topology is not None
            units = self.topology.host_of
        needed, layout, size = self.kv_needed, self.k_layout, self.team_size
        most, steps = room or layout.total, max(self.steps, 1)
        if self.gathered:
            most, steps = layout.total, 1
        held = self.held_keys * self.head_groups
        bound = Bound(most, held, self.head_groups, self.relays, self.few_senders)
        return arrivals(needed, layout, size, units, all_received, bound, steps)

    @cached_property
    def shared_rows(self) -> bool:
        """Whether some row is computed by more than one team, so that results are merged."""
        if not self.rows_move:
            return False
        rows = self.q_needed[np.argsort(self.q_needed[:, 1], kind="stable")]
        reach = np.maximum.accumulate(rows[:, 2])
        return bool((rows[1:, 1] < reach[:-1]).any())

    @cached_property
    def area(self) -> Ints:
        """int64[P]: pairs that each rank computes, for its share of the heads."""
        per_team = area_per_team(self.work, self.group_size // self.team_size)
        return per_team.astype(np.int64).repeat(self.team_size)

    @cached_property
    def kinds_of_calls(self) -> Bools:
        """bool[2, 2, P]: by rows (own, of others) and keys (own, of others), whether each rank
        attends such rows over such keys. All rows of a slice of work count as attending all its
        keys."""
        ranks = np.add.outer(self.work[:, TEAM] * self.team_size, np.arange(self.team_size))
        q0, q1, k0, k1 = self.work[:, [Q0, Q1, K0, K1]].T
        rows = moves.own_and_others(q0, q1, ranks, self.q_layout)
        keys = moves.own_and_others(k0, k1, ranks, self.k_layout)
        kinds = np.zeros((2, 2, self.group_size), dtype=bool)
        row, key, *which = (np.array(rows)[:, None] & np.array(keys)).nonzero()
        kinds[row, key, ranks[tuple(which)]] = True
        return kinds

    def calls(self, kv_heads: int) -> Ints:
        """int64[P]: kernel calls of each rank in a pass. Own rows, and rows of others, each take a
        call over own keys, and over keys of others a call for each step and group of heads. As
        :meth:`RankPlan.calls`, but for all ranks and before their parts are made. A call with many
        slices may be several calls of a library."""
        own_rows, rows_of_others = self.kinds_of_calls.astype(np.int64)
        groups = min(self.head_groups, kv_heads) * self.steps_with_keys
        if self.gathered:
            return groups * (own_rows.max(axis=0) + rows_of_others.max(axis=0))
        own_keys, keys_of_others = own_rows + rows_of_others
        return own_keys + groups * keys_of_others

    def batches_of_passes(self, kv_heads: int) -> tuple[Ints, Ints]:
        """int64[P] each: about how many batches of messages each rank sends or receives in a
        forward, and in a backward, as if each that receives keys did so in all of
        :attr:`steps_with_keys`."""
        groups = min(self.head_groups, kv_heads) * self.steps_with_keys
        keys, rows = self.kv_tokens().any(axis=1), self.q_tokens().any(axis=1)
        return batches(keys * groups, keys & self.relays, rows)

    @cached_property
    def steps_with_keys(self) -> int:
        """About how many steps received keys take; what needs several may leave some room."""
        most, room = int(self.kv_tokens()[:, 1].max(initial=0)), self.step_keys * self.head_groups
        if self.gathered:
            return 1
        return max(self.steps, math.ceil((1 + LEFT_OVER) * most / room) if 0 < room < most else 1)

    @cached_property
    def one_call_each(self) -> bool:
        """Whether no rank attends rows of others over keys that it received, so that all that
        travels home in the backward comes from a single call."""
        return not self.rows_move or not (self.gathered or self.kinds_of_calls[1, 1].any())

    @property
    def remote_stages(self) -> int:
        """Number of stages, from the first on, in which ranks attend rows of others, if any do."""
        return 1 if self.one_call_each else self.n_stages

    def heads_of_ranks(self, q_heads: int, kv_heads: int) -> Ints:
        """int64[P, 2]: query and key heads that each rank computes.

        Raises:
            ValueError: these heads cannot be split that many ways; see :func:`.head_shares`.
        """
        return heads_of_ranks(q_heads, kv_heads, self.team_size, self.group_size)

    def imbalance(self, q_heads: int, kv_heads: int) -> float:
        """Pairs times heads of the largest rank over the mean; 1 where there are none."""
        work = self.area * self.heads_of_ranks(q_heads, kv_heads)[:, 0]
        return float(work.max() / work.mean()) if work.any() else 1.0

    def kv_tokens(self) -> Ints:
        """int64[P, 2]: keys that each rank sends and receives, for one share of the heads each."""
        return self._tokens[0]

    def q_tokens(self) -> Ints:
        """The same for rows."""
        return self._tokens[1]

    @cached_property
    def _tokens(self) -> tuple[Ints, Ints]:
        keys = moves.counts(self.kv_needed, self.k_layout, self.team_size)
        if not self.rows_move:
            return keys, np.zeros_like(keys)
        return keys, moves.counts(self.q_needed, self.q_layout, self.team_size)
