"""A plan as a value: its tables, what moves, kernel calls and bytes. It knows neither times nor
how it was chosen nor how it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
from .arrivals import Arrivals, arrivals
from .assign.work import TEAM, Work, area_per_team
from .exchange import NO_MOVES, Exchange, Exchanges, exchange, exchanges_of_all
from .heads import Sizes, heads_of_ranks
from .key_exchanges import by_distance, key_exchanges
from .rank_plan import RankPlan, Stage, over_rows, over_stages
from .relays import Crossing, crossing, relayed_crossing
from .token_bytes import TokenBytes

HOST_RANKS = 8  # that may write into one another's memory, and so know what their peers receive


@dataclass(frozen=True, eq=False)
class PlanValue:
    """What every rank moves and computes.

    Attributes:
        work: int64[n, 7]: the mask's slices, cut, and the team that computes each.
        team_size: ranks that share out the heads of the same work; 1 where heads are not split.
            Team t is ranks t * team_size and following; the n-th of a team has the n-th share
            (:func:`.heads.head_shares`).
        steps: 0 where all keys that a rank needs, its own included, are gathered and attended at
            once; else in how many steps they arrive, if :attr:`arrivals` does not say.
        head_groups: in how many groups of key heads received keys arrive (:mod:`.head_groups`);
            of fewer key heads, each is a group.
        topology: hosts of the ranks; None: links are alike.
        most_keys: that a rank may receive in one step, of all heads, and as many more as there are
            groups of heads; 0: any.
        made: what the executor has worked out for this plan; goes with it.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    work: Work
    team_size: int
    steps: int
    head_groups: int = 1
    topology: Topology | None = None
    most_keys: int = 0
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
        if self.gathered or not self.keys_move:
            return 1
        return 1 + (self.steps if self.arrivals is None else self.arrivals.steps)

    @cached_property
    def relays(self) -> bool:
        """Whether keys that several ranks of a host need cross to it once."""
        return self.topology is not None and self.topology.relays and self.team_size == 1

    @property
    def few_at_once(self) -> bool:
        """Whether a rank holds few keys of others, and waits for their gradients to be at home, but
        for the last two exchanges."""
        return self.most_keys > 0 or self.arrivals is not None

    @cached_property
    def arrivals(self) -> Arrivals | None:
        """Steps by hosts, or so that ranks hold few keys; None: by ring distance, as many as
        :attr:`steps`."""
        received = int(self.kv_tokens()[:, 1].max(initial=0))
        room = self.most_keys * self.head_groups
        too_many = 0 < room < received
        if not (self.relays or too_many):
            return None
        units = np.arange(self.group_size) // self.team_size
        if self.relays:
            assert self.topology is not None
            units = self.topology.host_of
        most = room or self.k_layout.total
        if self.gathered:
            most = self.k_layout.total
        elif self.steps > 1:
            most = min(most, -(-received // self.steps))
        return arrivals(self.kv_needed, self.k_layout, self.team_size, units, max(most, 1))

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

    def calls(self, kv_heads: int) -> Ints:
        """int64[P]: kernel calls of each rank in a pass: of own rows and of those of others, each
        over own keys and over those of others; what attends keys of others is a call for each step
        and group of heads. As :meth:`RankPlan.calls`, but of all ranks and before their parts are
        made. A call of many slices may be several of a library."""
        own_rows, rows_of_others = self.kinds_of_calls.astype(np.int64)
        groups = min(self.head_groups, kv_heads) * self.steps_with_keys
        if self.gathered:
            return groups * (own_rows.max(axis=0) + rows_of_others.max(axis=0))
        own_keys, keys_of_others = own_rows + rows_of_others
        return own_keys + groups * keys_of_others

    @cached_property
    def steps_with_keys(self) -> Ints:
        """int64[P]: in about how many steps each rank receives keys."""
        received, room = self.kv_tokens()[:, 1], self.most_keys * self.head_groups
        if self.gathered:
            return np.ones_like(received)
        steps = np.full_like(received, max(self.steps, 1))
        if 0 < room < received.max(initial=0):
            steps = np.maximum(-(-5 * received // (4 * room)), steps)  # few steps are full
        return steps

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
        """What ``rank`` sends and receives, without what it attends; made on first use. The few
        ranks that write into one another's memory know so much of each other: so of these all are
        made where a second one is asked for. (A table of the moves of many ranks takes gigabytes.)
        """
        if rank not in self._exchanges:
            few = self.group_size <= HOST_RANKS and self.arrivals is None
            if self._exchanges and few:
                others = dict(enumerate(self._all_exchanges()))
                self._exchanges.update({**others, **self._exchanges})  # what is used stays
            else:
                self._exchanges[rank] = self._exchanges_of(rank)
        return self._exchanges[rank]

    def row_exchanges(self) -> Iterator[Exchange]:
        """What every rank sends and receives of rows."""
        rows = moves.located(self.q_needed, self.q_layout.pieces) if self.rows_move else NO_MOVES
        at_once = np.zeros(len(rows), dtype=np.int64)
        ranks = exchanges_of_all(rows, at_once, 1, self.group_size, self.team_size, local=False)
        return (q for (q,) in ranks)

    def _all_exchanges(self) -> Iterator[Exchanges]:
        """Of every rank, where keys do not come in steps of a bound."""
        ranks, size, steps = self.group_size, self.team_size, max(self.steps, 1)
        q, none = self.row_exchanges(), ((None,),) * ranks
        if self.n_stages == 1 and not self.gathered:
            return (Exchanges(mine, keys) for mine, keys in zip(q, none, strict=True))
        local = self.gathered
        some = moves.located(self.kv_needed, self.k_layout.pieces)
        some, step = by_distance(some, self.k_layout, size, steps, local=local)
        kv = exchanges_of_all(some, step, steps, ranks, size, local=local)
        own = () if local else (None,)
        return (Exchanges(mine, (*own, *keys)) for mine, keys in zip(q, kv, strict=True))

    def _exchanges_of(self, rank: int) -> Exchanges:
        size = self.team_size
        rows = NO_MOVES
        if self.rows_move:
            own = self.q_needed[:, 0] == rank // size
            rows = moves.of_rank(self.q_needed, own, self.q_layout, rank)
        q = exchange(rows, rank, size, local=False)
        if self.n_stages == 1 and not self.gathered:
            return Exchanges(q, (None,))
        of_keys = self.kv_needed, self.k_layout, rank, size
        steps = self.arrivals or max(self.steps, 1)
        if self.gathered:
            return Exchanges(q, tuple(key_exchanges(*of_keys, steps, self.relays, local=True)))
        return Exchanges(q, (None, *key_exchanges(*of_keys, steps, self.relays, local=False)))

    def _rank_plan(self, rank: int) -> RankPlan:
        q, of_stages = self.exchanges(rank)
        slices = self.work[self.work[:, TEAM] == rank // self.team_size, :TEAM]
        own = over_rows(slices, self.q_layout.places(rank))
        remote = over_rows(slices, q.places)
        places = [self.k_layout.places(rank) if kv is None else kv.places for kv in of_stages]
        sides = over_stages(own, places), over_stages(remote, places)
        stages = tuple(map(Stage, of_stages, *sides))
        return RankPlan(rank, q, stages, self.shared_rows, self.head_groups)

    def kv_tokens(self) -> Ints:
        """int64[P, 2]: keys that each rank sends and receives, for one share of the heads each."""
        return self._tokens[0]

    def q_tokens(self) -> Ints:
        """The same of rows."""
        return self._tokens[1]

    @cached_property
    def crossings(self) -> tuple[Crossing, Crossing]:
        """What moves inside hosts and between them, of keys and of rows; there is a topology."""
        assert self.topology is not None
        units, none = self.topology.host_of, np.zeros((self.group_size, 2), dtype=np.int64)
        if self.relays:
            keys = relayed_crossing(self.kv_needed, self.k_layout, units)
        else:
            keys = crossing(self.kv_needed, self.k_layout, self.team_size, units)
        if not self.rows_move:
            return keys, Crossing(none, none)
        return keys, crossing(self.q_needed, self.q_layout, self.team_size, units)

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
        """int64[P, 2]: bytes that each rank sends and receives in the forward pass, batch 1 (see
        :meth:`.TokenBytes.forward`), where each fetches what it needs by itself."""
        sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
        heads = self.heads_of_ranks(q_heads, kv_heads)
        return self._moved_bytes(TokenBytes.forward(sizes, heads))

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
        """The same of the backward pass (see :meth:`.TokenBytes.backward`).

        Args:
            reduce_itemsize: bytes per element of gradients that come home; None is that of the
                inputs where :attr:`one_call_each`, else 4, or 8 beside fp64.
            lse_gradient: whether the gradient of lse goes out with the rows.
        """
        sizes = Sizes.of(q_heads, kv_heads, head_dim, v_dim, itemsize)
        heads = self.heads_of_ranks(q_heads, kv_heads)
        home = self.home_itemsize(sizes, reduce_itemsize)
        return self._moved_bytes(TokenBytes.backward(sizes, heads, home, lse_gradient=lse_gradient))

    def home_itemsize(self, sizes: Sizes, reduce_itemsize: int | None = None) -> int:
        """Bytes per element of gradients that come home; see :meth:`backward_bytes`."""
        return reduce_itemsize or (sizes.itemsize if self.one_call_each else sizes.wide_itemsize)

    def _moved_bytes(self, of: TokenBytes) -> Ints:
        """int64[P, 2]: bytes that each rank sends and receives, of a token as each attends it."""

        def moved(needed: Ints, tokens: Ints, out: Ints, back: Ints) -> Ints:
            there = moves.sizes(needed, tokens, out, self.team_size)
            if not back.any():
                return there
            return there + moves.sizes(needed, tokens, back, self.team_size)[:, ::-1]

        keys = moved(self.kv_needed, self.kv_tokens(), of.key_out, of.key_back)
        if not self.rows_move:
            return keys
        return keys + moved(self.q_needed, self.q_tokens(), of.row_out, of.row_back)
