"""A plan as a value: what each rank sends, receives and attends, and how many bytes that is. It
knows nothing of times, of how it was chosen or of how it is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Ints
from . import moves
from .arrivals import SENDERS
from .assign.work import TEAM
from .exchanges.exchange import Exchange, Exchanges
from .exchanges.of_moves import exchanges, exchanges_of_all
from .exchanges.relays import Crossing, crossing, relayed, relayed_crossing
from .heads import Sizes, TokenBytes
from .moves import NO_MOVES
from .over_buffers import over_keys, over_rows
from .planned_work import PlannedWork
from .rank_plan import RankPlan, Stage

# What a plan works out from its work, its layouts and the hosts alone.
OF_WORK = (
    *("q_needed", "kv_needed", "_tokens", "rows_move", "keys_move", "shared_rows", "area"),
    *("kinds_of_calls", "crossings", "met", "relayed_part", "rows_of_others"),
)
# Of these, what follows from the keys that move.
OF_KEYS = "kv_needed", "_tokens", "crossings", "met", "relayed_part"
HOST_RANKS = 8  # that may write into one another's memory, and so know what their peers receive


@dataclass(frozen=True, eq=False)
class PlanValue(PlannedWork):
    """What every rank moves and computes.

    Attributes:
        made: what the executor has worked out for this plan, kept with it.
    """

    made: dict[Any, Any] = field(default_factory=dict, repr=False)
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False)
    _exchanges: dict[int, Exchanges] = field(default_factory=dict, repr=False)

    def variant(self, **changes: Any) -> PlanValue:
        """The same work with other ``steps``, ``head_groups``, ``held_keys``, ``few_senders`` or
        ``rounded``. What was worked out for it is kept, but where other keys move."""
        if self.topology is not None:
            _ = self.crossings  # takes the longest, and all variants ask for it
        other = replace(self, made={}, _ranks={}, _exchanges={}, **changes)
        kept = [name for name in OF_WORK if name not in OF_KEYS or "rounded" not in changes]
        vars(other).update((name, vars(self)[name]) for name in kept if name in vars(self))
        return other

    @property
    def is_gather(self) -> bool:
        """Whether each rank, one of a few of one host, gathers keys with all heads at once, and
        attends them with its own rows alone, in one call."""
        whole = self.team_size == self.head_groups == 1 and not (self.rows_move or self.few_at_once)
        few = self.topology is None and self.group_size <= HOST_RANKS
        return self.gathered and whole and few

    @cached_property
    def own_follow(self) -> bool:
        """Whether, of gathered keys, a rank's own come last (:func:`.moves.own_can_follow`)."""
        layout = self.k_layout
        return self.is_gather and moves.own_can_follow(
            moves.located(self.kv_needed, layout.pieces), layout
        )

    def rank(self, rank: int) -> RankPlan:
        """What ``rank`` does; made on first use."""
        if rank not in self._ranks:
            self._ranks[rank] = self._rank_plan(rank)
        return self._ranks[rank]

    def exchanges(self, rank: int) -> Exchanges:
        """What ``rank`` sends and receives, without what it attends; made on first use. The few
        ranks that write into one another's memory know this of each other, so theirs are all made
        together. (A table of the moves of many ranks takes gigabytes.)
        """
        if rank not in self._exchanges:
            if self.group_size <= HOST_RANKS and self.arrivals is None:
                self._exchanges.update(enumerate(self._all_exchanges()))
            else:
                self._exchanges[rank] = self._exchanges_of(rank)
        return self._exchanges[rank]

    def row_exchanges(self) -> Iterator[Exchange]:
        """The rows that every rank sends and receives."""
        ranks, size = self.group_size, self.team_size
        each = exchanges_of_all(self._row_moves(), NO_MOVES, 0, ranks, size, local=False)
        return (q for (q,) in each)

    def _row_moves(self) -> moves.Moves:
        return moves.located(self.q_needed, self.q_layout.pieces) if self.rows_move else NO_MOVES

    def _all_exchanges(self) -> Iterator[Exchanges]:
        """The exchanges of every rank, where keys do not arrive in bounded steps."""
        ranks, size, local = self.group_size, self.team_size, self.gathered
        keys, steps = NO_MOVES, 0
        if self.keys_move:
            steps = max(self.steps, 1)
            keys = moves.located(self.kv_needed, self.k_layout.pieces)
            keys = moves.by_distance(keys, ranks, steps, size, local=local)
        given = self._row_moves(), keys, steps, ranks, size
        each = exchanges_of_all(*given, local=local, as_held=self.own_follow)
        own = () if local else (None,)
        return (Exchanges(q, (*own, *kv)) for q, *kv in each)

    def _exchanges_of(self, rank: int) -> Exchanges:
        size = self.team_size
        rows = NO_MOVES
        if self.rows_move:
            mine = self.q_needed[:, 0] == rank // size
            rows = moves.of_rank(self.q_needed, mine, self.q_layout, rank)
        (q,) = exchanges(rows, 1, rank, size, local=False)
        if not self.keys_move:
            return Exchanges(q, (None,))
        own = () if self.gathered else (None,)
        return Exchanges(q, (*own, *self._key_exchanges(rank)))

    def _key_exchanges(self, rank: int) -> Iterable[Exchange]:
        """What ``rank`` sends and receives of keys in each step, also in one with nothing to do."""
        needed, layout, size, local = self.kv_needed, self.k_layout, self.team_size, self.gathered
        if self.arrivals is None:
            some = moves.of_rank(needed, needed[:, 0] == rank // size, layout, rank)
            steps = max(self.steps, 1)
            some = moves.by_distance(some, layout.group_size, steps, size, local=local)
            return exchanges(some, steps, rank, size, local=local)
        unit_of, steps = self.arrivals.unit_of, self.arrivals.steps
        own = unit_of[needed[:, 0] * size] == unit_of[rank]
        some = self.arrivals.cut(moves.of_rank(needed, own, layout, rank), size)
        if self.relays:
            return relayed(some, steps, rank, unit_of, local=local)
        return exchanges(some, steps, rank, size, local=local)

    def _rank_plan(self, rank: int) -> RankPlan:
        q, of_stages = self.exchanges(rank)
        slices = self.work[self.work[:, TEAM] == rank // self.team_size, :TEAM]
        own, remote = (over_rows(slices, each) for each in (self.q_layout.places(rank), q.places))
        stages = []
        for kv in of_stages:
            keys = self.k_layout.places(rank) if kv is None else kv.places
            keys = keys[keys[:, 0].argsort(kind="stable")]
            stages.append(Stage(kv, over_keys(own, keys), over_keys(remote, keys)))
        return RankPlan(rank, q, tuple(stages), self.shared_rows, self.head_groups)

    @cached_property
    def crossings(self) -> tuple[Crossing, Crossing]:
        """The keys and the rows that move inside and between hosts; there must be a topology."""
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
    def met(self) -> Ints:
        """Where keys are relayed, int64[U]: from how many other hosts a host has keys. Else
        int64[teams]: from about how many ranks each team has keys, at one shard from each."""
        if self.relays:
            return self.crossings[0].hosts
        team, start, stop = self.kv_needed.T
        keys = np.bincount(team, stop - start, minlength=self.group_size // self.team_size)
        return np.ceil(keys * self.group_size / max(self.k_layout.total, 1)).astype(np.int64)

    @property
    def all_meet(self) -> bool:
        """Whether each host, or team, has keys from at least half of all others, as with one long
        document."""
        others = len(self.met) - 1 if self.relays else self.group_size
        return 2 * int(self.met.min()) >= others

    @property
    def met_in_a_step(self) -> int:
        """How many of these are met in one step: some of them where all meet all, on a grid, or
        where senders are few."""
        most, steps = int(self.met.max()), self.steps_with_keys
        by_distance = self.all_meet or self.blocks > 1
        if by_distance or not self.few_senders:
            return -(-most // (steps if by_distance else 1))
        in_each = self.group_size // len(self.met) if self.relays else 1
        return max(-(-most // steps), min(most, SENDERS // (2 * in_each)))  # two pieces a rank

    @cached_property
    def rows_of_others(self) -> int:
        """The most rows that a rank receives, for its share of the heads, less as many as the other
        ranks of its team hold, because it gives these as many rows of its own."""
        sizes, received = np.array(self.q_layout.sizes), self.q_tokens()[:, 1]
        of_team = sizes.reshape(-1, self.team_size).sum(axis=1).repeat(self.team_size)
        return int((received - of_team + sizes).max(initial=0))

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
        :meth:`.TokenBytes.forward`), where each rank fetches what it needs by itself."""
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
        """The same for the backward pass (see :meth:`.TokenBytes.backward`).

        Args:
            reduce_itemsize: bytes per element of gradients that come home; None is that of the
                inputs where :attr:`one_call_each`, else 4, or 8 with fp64 inputs.
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
        """int64[P, 2]: bytes that each rank sends and receives; ``of`` has the bytes of a token."""

        def moved(needed: Ints, tokens: Ints, out: Ints, back: Ints) -> Ints:
            there = moves.sizes(needed, tokens, out, self.team_size)
            if not back.any():
                return there
            return there + moves.sizes(needed, tokens, back, self.team_size)[:, ::-1]

        keys = moved(self.kv_needed, self.kv_tokens(), of.key_out, of.key_back)
        if not self.rows_move:
            return keys
        return keys + moved(self.q_needed, self.q_tokens(), of.row_out, of.row_back)
