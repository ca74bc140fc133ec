"""From (mask, layouts) to what each rank receives and computes.

    mask + q_layout + k_layout --work--> who computes what --make_plan--> Plan
        --plan.rank(r)--> RankPlan --executor--> out, lse

A plan is a pure function of its arguments, in numpy: every rank makes the same one with no
collective and no device sync, and plans are cached by value. A token's key and value cross a link
once, and only where a slice needs them; so does a row.

"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout import Layout, LayoutError
from ..mask import AttnMask
from ..mask.intervals import Table, touched, union
from ..mask.slices import K0, K1, Q0, Q1, areas
from . import moves
from .cost import H200, CostModel
from .head_groups import best_head_groups
from .head_shares import HeadShare, head_shares
from .rank_plan import RankPlan, rank_plan
from .work import ASSIGNMENTS, TEAM, WORTH, Work

# What the busiest link may do to spare a kernel call: be at work for HIDDEN of the two passes,
# which kernels do not feel, but no more than BUSIER times what it is at the least.
HIDDEN, BUSIER = 0.25, 1.5


@dataclass(frozen=True, eq=False)
class Plan:
    """What every rank moves and computes. Made by :func:`make_plan`.

    Attributes:
        work: int64[n, 7]: the mask's slices, cut, and the team that computes each.
        team_size: ranks that share out the heads of the same work; 1 where heads are not split.
            Team t is ranks t * team_size and following; the n-th of a team has the n-th share
            (``core/head_shares.py``).
        steps: 0 where all keys that a rank needs, its own included, are gathered and attended at
            once; else in how many steps they arrive.
        head_groups: in how many groups of key heads received keys arrive (``core/head_groups.py``);
            of fewer key heads, each is a group.
        on_device: what the executor has copied to devices for this plan; goes with it.
    """

    mask: AttnMask
    q_layout: Layout
    k_layout: Layout
    work: Work
    team_size: int
    steps: int
    head_groups: int = 1
    on_device: dict[Any, Any] = field(default_factory=dict, repr=False)
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False)

    @property
    def group_size(self) -> int:
        """Number of ranks."""
        return self.q_layout.group_size

    @cached_property
    def q_needed(self) -> Table:
        """int64[n, 3]: rows that each team computes some of: team, start, stop."""
        return union(self.work[:, TEAM], self.work[:, Q0], self.work[:, Q1])

    @cached_property
    def kv_needed(self) -> Table:
        """int64[n, 3]: keys that each team attends: team, start, stop."""
        return union(self.work[:, TEAM], self.work[:, K0], self.work[:, K1])

    @cached_property
    def rows_move(self) -> bool:
        """Whether a rank computes rows of another."""
        return bool(self.q_tokens().any())

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
        moving = not self.gathered and self.keys_move
        return 1 + self.steps if moving else 1

    @cached_property
    def shared_rows(self) -> bool:
        """Whether some row is computed by more than one team, so that results are merged."""
        rows = self.q_needed[np.argsort(self.q_needed[:, 1], kind="stable")]
        reach = np.maximum.accumulate(rows[:, 2])
        return bool((rows[1:, 1] < reach[:-1]).any())

    @cached_property
    def area(self) -> npt.NDArray[np.int64]:
        """int64[P]: pairs that each rank computes, for its share of the heads."""
        teams = self.group_size // self.team_size
        per_team = np.zeros(teams, dtype=np.int64)
        np.add.at(per_team, self.work[:, TEAM], areas(self.work[:, :TEAM]))
        return np.repeat(per_team, self.team_size)

    @cached_property
    def kinds_of_calls(self) -> npt.NDArray[np.bool_]:
        """bool[2, 2, P]: whether each rank attends own rows, and those of others, over own keys,
        and over those of others; all rows of a slice of work count as attending all its keys."""
        team, size = self.work[:, TEAM], self.team_size
        kinds = np.zeros((2, 2, self.group_size), dtype=bool)
        for member in range(size):
            rank = team * size + member
            rows = _own_and_others(self.work[:, [Q0, Q1]], rank, self.q_layout)
            keys = _own_and_others(self.work[:, [K0, K1]], rank, self.k_layout)
            for n, m in np.ndindex(2, 2):
                kinds[n, m, rank[rows[n] & keys[m]]] = True
        return kinds

    def calls(self, kv_heads: int) -> Table:
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
        """Whether all that travels home in the backward is a single call's: no rank attends rows of
        others over keys that it received."""
        return not self.rows_move or not (self.gathered or self.kinds_of_calls[1, 1].any())

    @property
    def guest_stages(self) -> int:
        """In how many stages, from the first on, any rank attends rows of others, if one does."""
        return 1 if self.one_call_each else self.n_stages

    def heads_of_ranks(self, q_heads: int, kv_heads: int) -> Table:
        """int64[P, 2]: query and key heads that each rank computes.

        Raises:
            ValueError: these heads cannot be split so many ways; see :func:`.head_shares`.
        """
        shares = head_shares(q_heads, kv_heads, self.team_size)
        of_team = np.array([[share.q_heads, share.kv_heads] for share in shares])
        return np.tile(of_team, (self.group_size // self.team_size, 1))

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
            size = self.team_size
            kv_moves = moves.of_rank(self.kv_needed, self.k_layout, rank, size)
            stage_of = (
                np.zeros(len(kv_moves), dtype=np.int64)
                if self.gathered
                else moves.ring_stage(kv_moves, self.group_size, max(self.steps, 1), size)
            )
            pieces = self.k_layout.pieces
            self._ranks[rank] = rank_plan(
                rank,
                self.work[self.work[:, TEAM] == rank // size, :TEAM],
                moves.of_rank(self.q_needed, self.q_layout, rank, size),
                kv_moves,
                stage_of,
                pieces[pieces[:, 0] == rank, 1:],
                self.n_stages,
                team_size=size,
                gathered=self.gathered,
                shared_rows=self.shared_rows,
                head_groups=self.head_groups,
            )
        return self._ranks[rank]

    def kv_tokens(self) -> Table:
        """int64[P, 2]: key tokens that each rank sends and receives (each is one k and one v), for
        one share of the heads each."""
        return self._kv_tokens

    def q_tokens(self) -> Table:
        """int64[P, 2]: query rows that each rank sends and receives, for one share each."""
        return self._q_tokens

    @cached_property
    def _kv_tokens(self) -> Table:
        return moves.counts(self.kv_needed, self.k_layout, self.team_size)

    @cached_property
    def _q_tokens(self) -> Table:
        return moves.counts(self.q_needed, self.q_layout, self.team_size)

    def traffic(self) -> tuple[Table, Table]:
        """(keys, rows): int64[P, P] tokens that rank [s, r] sends to rank r, for one share each."""
        return (
            moves.traffic(self.kv_needed, self.k_layout, self.team_size),
            moves.traffic(self.q_needed, self.q_layout, self.team_size),
        )

    def report(
        self,
        q_heads: int = 32,
        kv_heads: int = 8,
        head_dim: int = 128,
        v_dim: int | None = None,
        itemsize: int = 2,
        reduce_itemsize: int | None = None,
    ) -> str:
        """The plan as a table; see :func:`.report.report`."""
        from ..report import report

        sizes = q_heads, kv_heads, head_dim, v_dim, itemsize
        return report(self, *sizes, reduce_itemsize=reduce_itemsize)

    def __str__(self) -> str:
        """The plan as a table, for bf16 with the heads of many a model."""
        return self.report(32 * self.team_size, 8 * self.team_size)

    def draw(
        self,
        path: str,
        q_heads: int = 32,
        kv_heads: int = 8,
        head_dim: int = 128,
        v_dim: int | None = None,
        itemsize: int = 2,
    ) -> None:
        """Draw the plan to a PNG or SVG file; see :func:`.draw.draw`."""
        from ..report.draw import draw

        draw(self, path, q_heads, kv_heads, head_dim, v_dim, itemsize)

    def forward_bytes(
        self, q_heads: int, kv_heads: int, head_dim: int, v_dim: int | None, itemsize: int
    ) -> Table:
        """int64[P, 2]: bytes that each rank sends and receives in the forward pass, batch 1.

        Keys and values go out; rows go out, their output and lse come back.
        """
        h, g = self.heads_of_ranks(q_heads, kv_heads).T
        v_dim = head_dim if v_dim is None else v_dim
        stat = max(itemsize, 4)  # lse is fp32, fp64 beside fp64
        keys = self._kv_bytes(g * (head_dim + v_dim) * itemsize)
        there = self._q_bytes(h * head_dim * itemsize)
        back = self._q_bytes(h * (v_dim * itemsize + stat))[:, ::-1]
        return keys + there + back

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
    ) -> Table:
        """int64[P, 2]: bytes that each rank sends and receives in the backward pass, batch 1.

        k and v go out again, dk and dv come home; rows of q, out and dout with their lse go out, dq
        comes home.

        Args:
            reduce_itemsize: bytes per element of gradients that come home; None is that of the
                inputs where :attr:`one_call_each`, else 4, or 8 beside fp64.
            lse_gradient: whether the gradient of lse goes out with the rows.
        """
        h, g = self.heads_of_ranks(q_heads, kv_heads).T
        v_dim = head_dim if v_dim is None else v_dim
        wide = max(itemsize, 4)
        home = reduce_itemsize or (itemsize if self.one_call_each else wide)
        row = (head_dim + 2 * v_dim) * itemsize + (1 + lse_gradient) * wide
        there = self._kv_bytes(g * (head_dim + v_dim) * itemsize) + self._q_bytes(h * row)
        back = self._kv_bytes(g * (head_dim + v_dim) * home) + self._q_bytes(h * head_dim * home)
        return there + back[:, ::-1]

    def _kv_bytes(self, size: Table) -> Table:
        """int64[P, 2]: bytes that each rank sends and receives if of each key token that rank r
        is to attend it receives ``size[r]``."""
        return moves.sizes(self.kv_needed, self._kv_tokens, size, self.team_size)

    def _q_bytes(self, size: Table) -> Table:
        """The same of query rows."""
        return moves.sizes(self.q_needed, self._q_tokens, size, self.team_size)


def _own_and_others(
    ranges: Table, rank: Table, layout: Layout
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether each range of tokens has some that its rank holds, and some that others hold."""
    pieces = layout.pieces
    count = len(pieces)
    of_holders = np.sort(pieces[:, 0] * count + np.arange(count))  # by holder, then in order
    first, last = touched(ranges[:, 0], ranges[:, 1], pieces[:, 1:3])
    own = np.searchsorted(of_holders, rank * count + last)
    own -= np.searchsorted(of_holders, rank * count + first)
    return own > 0, own < last - first


def make_plan(
    mask: AttnMask,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    assignment: str = "auto",
    stages: int | None = None,
    heads: tuple[int, int] = (32, 8),
    team_size: int | None = 1,
    head_groups: int | None = None,
    costs: CostModel = H200,
) -> Plan:
    """Plan attention of ``mask`` over ranks that hold q and k, v as the layouts say.

    Args:
        mask: over the whole sequences.
        q_layout, k_layout: where tokens lie; ``k_layout`` is ``q_layout`` if None.
        assignment: who computes what. ``"owner"``: the holder of a row computes it, and keys move;
            ``"balanced"``: as owner, but ranks with too much work give rows away; ``"nearest"``: as
            balanced, but rows move to the keys where that moves fewer bytes; ``"shared"``: the
            holders of rows and of keys each compute some of the pairs that lie between them, until
            it is even; ``"zigzag"``: as if q were laid out zigzag. ``"auto"`` tries all but the
            last: of those that ``costs`` says are the fastest, within a twentieth, and whose bytes
            are hidden or about the fewest, the one with the fewest kernel calls, then bytes.
        stages: 0 gathers all keys a rank needs and attends them at once; n >= 1 attends the local
            keys first, then the remote ones in n steps by ring distance, the next step's keys
            arriving meanwhile. None chooses 1, or 0 where ``costs`` say that it is faster by more
            than a twentieth: where so little is attended that starting another call takes longer
            than waiting for the keys.
        heads: query and key heads. Their ratio is what a row costs to move beside a key, and they
            bound ``team_size``.
        team_size: ranks that share out the heads of the same work (Ulysses, Jacobs et al.,
            arXiv:2309.14509, 2023, within a team); divides the number of ranks, and is at most the
            query heads. Shares may differ in size, and ranks may share a key head. None takes the
            fastest.
        head_groups: in how many groups of key heads received keys arrive, so that the first is
            attended, and its gradients go home, while the next arrives; 1 where ranks share out
            heads, and where no keys move. None takes what ``costs`` say is the fastest, more than
            one only where that spares 3 % of the time.
        costs: rates to choose by.
    Raises:
        LayoutError: a layout's total is not the mask's length, or the groups differ in size.
        ValueError: unknown ``assignment``, negative ``stages``, ``team_size`` does not divide the
            ranks or is too large, heads that are split are no multiple of one another, or
            ``head_groups`` is not 1 to the key heads, or more than 1 with heads split.
    """
    k_layout = q_layout if k_layout is None else k_layout
    if (q_layout.total, k_layout.total) != (mask.q_len, mask.k_len):
        raise LayoutError(
            f"the mask is {mask.q_len} queries x {mask.k_len} keys, but the layouts hold "
            f"{q_layout.total} and {k_layout.total} tokens"
        )
    if q_layout.group_size != k_layout.group_size:
        raise LayoutError(f"q lies on {q_layout.group_size} ranks and k on {k_layout.group_size}")
    if stages is not None and stages < 0:
        raise ValueError(f"stages must be 0 or more, got {stages}")
    if head_groups is not None and not 1 <= head_groups <= max(heads[1], 1):
        raise ValueError(f"head_groups must be 1 to the {heads[1]} key heads, got {head_groups}")
    if head_groups is not None and head_groups > 1:
        if team_size != 1:
            raise ValueError(
                f"head_groups={head_groups} needs team_size=1, got {team_size}: heads are split "
                "between ranks or in groups, not both"
            )
        head_shares(*heads, head_groups)
    if assignment not in ASSIGNMENTS:
        known = ", ".join(ASSIGNMENTS)
        raise ValueError(f"assignment must be one of {known}, got {assignment!r}")
    if team_size is not None:
        if team_size < 1 or q_layout.group_size % team_size or team_size > max(heads[0], 1):
            raise ValueError(
                f"team_size must divide the {q_layout.group_size} ranks and be at most the "
                f"{heads[0]} query heads, got {team_size}"
            )
        head_shares(*heads, team_size)
    options = assignment, stages, heads, team_size, head_groups, costs
    return _make_plan(mask, q_layout, k_layout, *options)


# A batch has a plan or two for all its layers; a plan of many pieces may take megabytes.
@lru_cache(maxsize=32)
def _make_plan(
    mask: AttnMask,
    q_layout: Layout,
    k_layout: Layout,
    assignment: str,
    stages: int | None,
    heads: tuple[int, int],
    team_size: int | None,
    head_groups: int | None,
    costs: CostModel,
) -> Plan:
    """The best of all candidates, the simplest first."""
    ranks = q_layout.group_size
    most = min(ranks, heads[0])
    sizes = [team_size] if team_size else [n for n in range(1, most + 1) if ranks % n == 0]
    plans: list[Plan] = []
    for size in sizes:
        if plans and not _may_be_faster(plans, costs, heads):
            break
        row_cost = heads[0] / max(heads[1], size)  # a team receives a copy of a key for each rank
        works = ASSIGNMENTS[assignment](mask.slices, q_layout, k_layout, size, row_cost)
        steps = min(1 if stages is None else stages, max(ranks // size - 1, 1))
        plans += [Plan(mask, q_layout, k_layout, work, size, steps) for work in works]
    if stages is None:
        plans = [_staged_or_gathered(plan, costs, heads) for plan in plans]
    plans = [_in_groups(plan, head_groups, costs, heads) for plan in plans]
    return plans[0] if len(plans) == 1 else _best(plans, costs, heads)


def _in_groups(
    plan: Plan, head_groups: int | None, costs: CostModel, heads: tuple[int, int]
) -> Plan:
    """``plan``, with keys that arrive in so many groups of heads, or as many as is best."""
    if plan.team_size > 1 or not plan.keys_move:
        return plan
    count = best_head_groups(plan, costs, heads) if head_groups is None else head_groups
    return plan if count == 1 else replace(plan, head_groups=count, on_device={}, _ranks={})


def _staged_or_gathered(plan: Plan, costs: CostModel, heads: tuple[int, int]) -> Plan:
    """``plan``, or the same without stages where that is faster by more than a twentieth."""
    if plan.n_stages == 1:
        return plan
    gathered = Plan(plan.mask, plan.q_layout, plan.k_layout, plan.work, plan.team_size, steps=0)
    staged_seconds, gathered_seconds = (_seconds(each, costs, heads) for each in (plan, gathered))
    return gathered if gathered_seconds < 0.95 * staged_seconds else plan


def _seconds(plan: Plan, costs: CostModel, heads: tuple[int, int]) -> float:
    """Of a forward and a backward pass."""
    return sum(each.seconds for each in costs.passes(plan, *heads, 128, 128, 2))


def _may_be_faster(plans: list[Plan], costs: CostModel, heads: tuple[int, int]) -> bool:
    """Whether splitting heads could be worth it: not where one of ``plans`` is within a twentieth
    of kernels alone, evenly loaded."""
    passes = [costs.passes(plan, *heads, 128, 128, 2) for plan in plans]
    least = sum(float(each.compute.mean()) for each in passes[0])
    return least < 0.95 * min(sum(each.seconds for each in both) for both in passes)


def _best(plans: list[Plan], costs: CostModel, heads: tuple[int, int]) -> Plan:
    """Of the plans that are the fastest within a twentieth, those whose busiest link is well hidden
    behind kernels or hardly busier than the least busy one; of those one with the fewest calls, and
    of these the one with the least busy link. (Two H200s, contiguous shards of a causal mask: a
    call less was worth 0.6 to 6 % from 8k tokens to 64k, and 1.3 times the bytes cost nothing.)"""
    passes = [costs.passes(plan, *heads, 128, 128, 2) for plan in plans]
    seconds = [sum(each.seconds for each in both) for both in passes]
    link = [sum(float(each.link.max()) for each in both) for both in passes]
    fast = [n for n in range(len(plans)) if seconds[n] <= 1.05 * min(seconds)]
    least = min(link[n] for n in fast)
    most = min(max(least / WORTH, HIDDEN * min(seconds)), BUSIER * least)
    light = [n for n in fast if link[n] <= most]
    return plans[min(light, key=lambda n: (plans[n].calls(heads[1]).max(), link[n]))]
