"""A plan as a value: its tables, what moves, kernel calls and bytes. It knows neither times nor
how it was chosen nor how it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Bools, Ints
from ..layout import Layout
from ..mask import AttnMask
from ..mask.intervals import union
from ..mask.slices import K0, K1, Q0, Q1, areas, cut_keys
from . import moves
from .assign.work import TEAM, Work, area_per_team
from .exchange import NO_MOVES, Exchanges, exchange
from .heads import HeadShare, Sizes, head_shares, heads_of_ranks
from .rank_plan import RankPlan, Stage, over_keys, over_rows


@dataclass(frozen=True, eq=False)
class PlanValue:
    """What every rank moves and computes.

    Attributes:
        work: int64[n, 7]: the mask's slices, cut, and the team that computes each.
        team_size: ranks that share out the heads of the same work; 1 where heads are not split.
            Team t is ranks t * team_size and following; the n-th of a team has the n-th share
            (:func:`.heads.head_shares`).
        steps: 0 where all keys that a rank needs, its own included, are gathered and attended at
            once; else in how many steps they arrive.
        head_groups: in how many groups of key heads received keys arrive (:mod:`.head_groups`);
            of fewer key heads, each is a group.
        made: what the executor has worked out for this plan; goes with it.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    work: Work
    team_size: int
    steps: int
    head_groups: int = 1
    made: dict[Any, Any] = field(default_factory=dict, repr=False)
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False)
    _exchanges: dict[int, Exchanges] = field(default_factory=dict, repr=False)

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return self.q_layout.group_size

    @cached_property
    def q_needed(self) -> Ints:
        """int64[n, 3]: rows that each team computes some of: team, start, stop."""
        return union(self.work[:, TEAM], self.work[:, Q0], self.work[:, Q1])

    @cached_property
    def kv_needed(self) -> Ints:
        """int64[n, 3]: keys that each team attends: team, start, stop."""
        return union(self.work[:, TEAM], self.work[:, K0], self.work[:, K1])

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
        return 1 if self.gathered or not self.keys_move else 1 + self.steps

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
        """bool[2, 2, P]: whether each rank attends own rows, and those of others, over own keys,
        and over those of others; all rows of a slice of work count as attending all its keys."""
        ranks = np.add.outer(self.work[:, TEAM] * self.team_size, np.arange(self.team_size))
        q0, q1, k0, k1 = self.work[:, [Q0, Q1, K0, K1]].T
        rows = moves.own_and_others(q0, q1, ranks, self.q_layout)
        keys = moves.own_and_others(k0, k1, ranks, self.k_layout)
        kinds = np.zeros((2, 2, self.group_size), dtype=bool)
        row, key, *which = (np.stack(rows)[:, None] & np.stack(keys)).nonzero()
        kinds[row, key, ranks[tuple(which)]] = True
        return kinds

    def by_holder_of_keys(self, rank: int) -> tuple[int, int]:
        """Of a rank, where heads are not split: pairs whose keys it holds itself, and rows of
        slices with keys that it does not hold; a row of several slices counts for each."""
        slices = self.work[self.work[:, TEAM] == rank, :TEAM]
        x, _, parts = cut_keys(slices, self.k_layout.places(rank)[:, :2])
        held = np.bincount(x, parts[:, K1] - parts[:, K0], minlength=len(slices))
        rows = (slices[:, Q1] - slices[:, Q0])[held < slices[:, K1] - slices[:, K0]]
        return int(areas(parts).sum()), int(rows.sum())

    def calls(self, kv_heads: int) -> Ints:
        """int64[P]: kernel calls of each rank in a pass: of own rows and of those of others, each
        over own keys and over those of others; what attends keys of others is a call for each group
        of heads. As :meth:`RankPlan.calls`, but of all ranks and before their parts are made, with
        keys as if they came in one step. A call of many slices may be several of a library."""
        own_rows, rows_of_others = self.kinds_of_calls.astype(np.int64)
        groups = min(self.head_groups, kv_heads)
        if self.gathered:
            return groups * (own_rows.max(axis=0) + rows_of_others.max(axis=0))
        own_keys, keys_of_others = own_rows + rows_of_others
        return own_keys + groups * keys_of_others

    @cached_property
    def one_call_each(self) -> bool:
        """Whether no rank attends rows of others over keys that it received, so that all that
        travels home in the backward is a single call's."""
        return not self.rows_move or not (self.gathered or self.kinds_of_calls[1, 1].any())

    @property
    def remote_stages(self) -> int:
        """In how many stages, from the first on, any rank attends rows of others, if one does."""
        return 1 if self.one_call_each else self.n_stages

    def heads_of_ranks(self, q_heads: int, kv_heads: int) -> Ints:
        """int64[P, 2]: query and key heads that each rank computes.

        Raises:
            ValueError: these heads cannot be split so many ways; see :func:`.head_shares`.
        """
        return heads_of_ranks(q_heads, kv_heads, self.team_size, self.group_size)

    def largest_share(self, q_heads: int, kv_heads: int) -> HeadShare:
        """The heads of the rank that has the most; errors are those of :meth:`heads_of_ranks`."""
        shares = head_shares(q_heads, kv_heads, self.team_size)
        return max(shares, key=lambda share: share.q_heads)

    def imbalance(self, q_heads: int, kv_heads: int) -> float:
        """Pairs times heads of the largest rank over the mean; 1 where there are none."""
        work = self.area * self.heads_of_ranks(q_heads, kv_heads)[:, 0]
        return float(work.max() / work.mean()) if work.any() else 1.0

    def rank(self, rank: int) -> RankPlan:
        """What ``rank`` does; made on first use."""
        if rank not in self._ranks:
            self._ranks[rank] = self._rank_plan(rank)
        return self._ranks[rank]

    def exchanges(self, rank: int) -> Exchanges:
        """What ``rank`` sends and receives, without what it attends; made on first use. Ranks that
        write into one another's memory know so much of each other."""
        if rank not in self._exchanges:
            self._exchanges[rank] = self._exchanges_of(rank)
        return self._exchanges[rank]

    def _exchanges_of(self, rank: int) -> Exchanges:
        size = self.team_size
        moved = self.rows_move
        rows = moves.of_rank(self.q_needed, self.q_layout, rank, size) if moved else NO_MOVES
        q = exchange(rows, rank, size, local=False)
        kv_moves = moves.of_rank(self.kv_needed, self.k_layout, rank, size)
        if self.gathered:  # the rank's own keys are copied beside those that it receives
            return Exchanges(q, (exchange(kv_moves, rank, size, local=True),))
        stage_of = moves.ring_stage(kv_moves, self.group_size, max(self.steps, 1), size)
        # A rank with nothing to do in a stage still has it.
        later = (
            exchange(kv_moves[stage_of == n], rank, size, local=False)
            for n in range(1, self.n_stages)
        )
        return Exchanges(q, (None, *later))

    def _rank_plan(self, rank: int) -> RankPlan:
        q, of_stages = self.exchanges(rank)
        slices = self.work[self.work[:, TEAM] == rank // self.team_size, :TEAM]
        own = over_rows(slices, self.q_layout.places(rank))
        remote = over_rows(slices, q.places)
        stages = []
        for kv in of_stages:
            keys = self.k_layout.places(rank) if kv is None else kv.places
            stages.append(Stage(kv, over_keys(own, keys), over_keys(remote, keys)))
        return RankPlan(rank, q, tuple(stages), self.shared_rows, self.head_groups)

    def kv_tokens(self) -> Ints:
        """int64[P, 2]: keys that each rank sends and receives, for one share of the heads each."""
        return self._tokens[0]

    def q_tokens(self) -> Ints:
        """The same of rows."""
        return self._tokens[1]

    @cached_property
    def _tokens(self) -> tuple[Ints, Ints]:
        keys = moves.counts(self.kv_needed, self.k_layout, self.team_size)
        if not self.rows_move:
            return keys, np.zeros_like(keys)
        return keys, moves.counts(self.q_needed, self.q_layout, self.team_size)

    def traffic(self) -> tuple[Ints, Ints]:
        """(keys, rows): int64[P, P] tokens that rank [s, r] sends to rank r, for one share each."""
        return (
            moves.traffic(self.kv_needed, self.k_layout, self.team_size),
            moves.traffic(self.q_needed, self.q_layout, self.team_size),
        )

    def forward_bytes(
        self, q_heads: int, kv_heads: int, head_dim: int, v_dim: int | None, itemsize: int
    ) -> Ints:
        """int64[P, 2]: bytes that each rank sends and receives in the forward pass, batch 1: keys
        and values go out; rows go out, their output and lse come back."""
        h, g = self.heads_of_ranks(q_heads, kv_heads).T
        sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
        keys = self._kv_bytes(sizes.kv_bytes(g))
        if not self.rows_move:
            return keys
        rows, results = self._q_bytes(sizes.q_bytes(h)), self._q_bytes(sizes.result_bytes(h))
        return keys + rows + results[:, ::-1]

    def backward_bytes(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None,
        itemsize: int,
        reduce_itemsize: int | None = None,
        *,
        lse_gradient: bool = False,
    ) -> Ints:
        """int64[P, 2]: bytes that each rank sends and receives in the backward pass, batch 1.

        k and v go out again, dk and dv come home; rows of q, out and dout with their lse go out, dq
        comes home.

        Args:
            reduce_itemsize: bytes per element of gradients that come home; None is that of the
                inputs where :attr:`one_call_each`, else 4, or 8 beside fp64.
            lse_gradient: whether the gradient of lse goes out with the rows.
        """
        h, g = self.heads_of_ranks(q_heads, kv_heads).T
        sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
        wide = sizes.wide_itemsize
        home = reduce_itemsize or (itemsize if self.one_call_each else wide)
        gradients = sizes._replace(itemsize=home)
        keys = self._kv_bytes(sizes.kv_bytes(g))
        keys = keys + self._kv_bytes(gradients.kv_bytes(g))[:, ::-1]
        if not self.rows_move:
            return keys
        row = sizes.q_bytes(h) + sizes.result_bytes(h)
        row = row + h * (sizes.v_dim * itemsize + lse_gradient * wide)
        return keys + self._q_bytes(row) + self._q_bytes(gradients.q_bytes(h))[:, ::-1]

    def _kv_bytes(self, size: Ints) -> Ints:
        """int64[P, 2]: bytes that each rank sends and receives if of each key token that rank r
        is to attend it receives ``size[r]``."""
        return moves.sizes(self.kv_needed, self.kv_tokens(), size, self.team_size)

    def _q_bytes(self, size: Ints) -> Ints:
        """The same of query rows."""
        return moves.sizes(self.q_needed, self.q_tokens(), size, self.team_size)
